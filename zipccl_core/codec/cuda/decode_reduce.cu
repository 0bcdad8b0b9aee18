// Decode and reduce: the terms of R ranks, frames or plain words, summed in rank order and written once.
//
// The sum, exactly: acc = term of rank 0; acc = fl32(acc + term); a term is fl32(x * factor) if there is a factor; at
// the end fl32(acc / ranks) if averaging; one rounding to nearest even; every NaN is 0x7FC0 (float32: 0x7FC00000). No
// contraction, no flush to zero. Decoded words never reach device memory.
#include "reader.cuh"

// Ranks whose codebooks and sums a thread block keeps in shared memory; of more, it goes to device memory each time.
constexpr u32 KEPT_RANKS = 32;
constexpr u32 SCALE_PREMUL = 1, SCALE_AVG = 2;  // 0: neither

__device__ __forceinline__ u32 rounded_pair(float a, float b) {
    u32 x = __float_as_uint(a), y = __float_as_uint(b);
    u32 low = (x + 0x7fff + (x >> 16 & 1)) >> 16, high = (y + 0x7fff + (y >> 16 & 1)) & 0xffff0000u;
    if ((x & 0x7fffffffu) > 0x7f800000u) low = 0x7fc0u;
    if ((y & 0x7fffffffu) > 0x7f800000u) high = 0x7fc00000u;
    return low | high;
}

// The ranks' terms of one tile after another: rank r of tile i is step i * ranks + r.
template <u32 ELEMENT_BYTES>
struct TermCursor {
    u32 tile, rank;
    Entries entries;

    __device__ __forceinline__ void ask(const FrameJob* jobs, u32 tiles) {
        if (tile < tiles && jobs[rank].frame) entries = read_entries(jobs[rank], tile);
    }
    __device__ __forceinline__ void advance(u32 ranks) {
        if (++rank == ranks) rank = 0, tile += gridDim.x;
    }
    __device__ __forceinline__ static bool loads_ahead(u64 words, u32 m) {
        return words % 16 == 0 && m * ELEMENT_BYTES % 16 == 0;
    }
    __device__ __forceinline__ void load(const FrameJob* jobs, u32 tiles, u8* stage, BlockPlan& plan, StageLoads loads,
                                         bool elected) {
        if (tile < tiles) {
            const FrameJob& job = jobs[rank];
            if (job.frame) {
                load_block<ELEMENT_BYTES>(job, tile, entries, stage, plan, loads, elected);
            } else {
                const u32 m = block_words(job.n, tile);
                const u64 words = job.words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
                if (loads_ahead(words, m)) {
                    loads.expect(m * ELEMENT_BYTES, elected);
                    loads.load(stage, (const void*)words, m * ELEMENT_BYTES, elected);
                }
            }
        }
        loads.commit();
    }
};

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void reduce_tiles(const JobTable& table, u64 out, u32 scale, float factor,
                                             ReadScratch* scratch, Verdict* verdicts) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<ReadShared<ELEMENT_BYTES>*>(shared_bytes);
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    __shared__ u64 kept_codebook[KEPT_RANKS], kept_digest[KEPT_RANKS], kept_escapes[KEPT_RANKS];

    const u32 t = threadIdx.x;
    const bool elected = t == 0;
    const bool loader = !ZIPCCL_BULK || elected;
    const FrameJob* jobs = table.all();
    const u32 ranks = table.jobs, tiles = table.tiles;
    const u64 n = jobs[0].n;
    const Weights<ELEMENT_BYTES> weights;
    if (t < KEPT_RANKS) {
        kept_digest[t] = kept_escapes[t] = 0;
        kept_codebook[t] = t < ranks && jobs[t].frame ? codebook_of_frame(jobs[t]) : 0;
    }

    TermCursor<ELEMENT_BYTES> cursor{blockIdx.x, 0, {0, 0}};
#pragma unroll
    for (u32 s = 0; s < READ_STAGES; ++s) StageLoads{&shared.barriers[s]}.init(elected);
    __syncthreads();
    if (loader) {
        cursor.ask(jobs, tiles);
#pragma unroll
        for (u32 s = 0; s < READ_STAGES; ++s) {
            cursor.load(jobs, tiles, shared.stage[s], shared.plan[s], StageLoads{&shared.barriers[s]}, elected);
            cursor.advance(ranks);
            cursor.ask(jobs, tiles);
        }
    }
    __syncthreads();

    u32 stage = 0, phases = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 m = block_words(n, tile);
        float acc[THREAD_WORDS];
        for (u32 rank = 0; rank < ranks; ++rank) {
            const FrameJob& job = jobs[rank];
            const u64 words = job.words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
            const bool ahead = job.frame || TermCursor<ELEMENT_BYTES>::loads_ahead(words, m);
            StageLoads{&shared.barriers[stage]}.template wait<READ_STAGES - 1>(ahead, phases >> stage & 1);
            phases ^= u32(ahead) << stage;

            const u8* elements = shared.elements;
            u32 low = 0, low_seen = 0, block_escapes = 0;
            if (job.frame) {
                low = shared.plan[stage].low;
                block_escapes = rebuild_block<ELEMENT_BYTES>(shared, stage, tile, m, 
                                                             Codes(rank < KEPT_RANKS ? kept_codebook[rank]
                                                                                     : codebook_of_frame(job)),
                                                             weights,
                                                             scratch->of_job[rank], elected, low_seen);
            } else {
                elements = shared.stage[stage];
                if (!ahead) {
                    for (u32 i = t; i < m; i += THREADS)
                        ((Element*)shared.stage[stage])[i] = ((const Element*)words)[i];
                    __syncthreads();
                }
            }

#pragma unroll
            for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
                for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                    const uint4 x = *(const uint4*)(elements + chunk_offset<ELEMENT_BYTES>(slot) + q * 16);
                    const u32 raw[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) {
                        u32 bits = ELEMENT_BYTES == 4 ? raw[i % 4] : i & 1 ? raw[i / 2] & 0xffff0000u : raw[i / 2] << 16;
                        float term = __uint_as_float(bits);
                        if (scale == SCALE_PREMUL) term = __fmul_rn(term, factor);
                        float& a = acc[slot * 8 + q * (16 / ELEMENT_BYTES) + i];
                        a = rank ? __fadd_rn(a, term) : term;
                    }
                }

            if (ELEMENT_BYTES == 4) {
                const bool any_low = __syncthreads_or(int(low_seen));
                if (low && !any_low && t == 0) report_fault(scratch->of_job[rank], FAULT_CANONICAL, tile, 0);
            } else {
                __syncthreads();
            }
            if (loader) {
                cursor.load(jobs, tiles, shared.stage[stage], shared.plan[stage], StageLoads{&shared.barriers[stage]},
                            elected);
                cursor.advance(ranks);
                cursor.ask(jobs, tiles);
            }
            if (t == 32 && job.frame) {
                u64 block_sum = 0;
#pragma unroll
                for (u32 w = 0; w < WARPS; ++w) block_sum += shared.warp_sums[w];
                block_sum = mixed_block_sum(block_sum, tile);
                if (rank < KEPT_RANKS) {  // this thread's alone
                    kept_digest[rank] += block_sum;
                    kept_escapes[rank] += block_escapes;
                } else {
                    atomicAdd(&scratch->of_job[rank].digest, block_sum);
                    atomicAdd(&scratch->of_job[rank].escapes, u64(block_escapes));
                }
            }
            stage = stage + 1 == READ_STAGES ? 0 : stage + 1;
        }

        if (scale == SCALE_AVG) {
#pragma unroll
            for (u32 i = 0; i < THREAD_WORDS; ++i) acc[i] = __fdiv_rn(acc[i], factor);
        }
        wait_stores_read(elected);
        __syncthreads();
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
            for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                u32 x[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 at = slot * 8 + q * (16 / ELEMENT_BYTES);
                    if (ELEMENT_BYTES == 2) {
                        x[i] = rounded_pair(acc[at + 2 * i], acc[at + 2 * i + 1]);
                    } else {
                        x[i] = __float_as_uint(acc[at + i]);
                        if ((x[i] & 0x7fffffffu) > 0x7f800000u) x[i] = 0x7fc00000u;
                    }
                }
                *(uint4*)(shared.elements + chunk_offset<ELEMENT_BYTES>(slot) + q * 16) =
                    make_uint4(x[0], x[1], x[2], x[3]);
            }
        publish_shared();
        __syncthreads();
        const u64 to = out + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
        if (to % 16 == 0 && m * ELEMENT_BYTES % 16 == 0) {
            store_tile((void*)to, shared.elements, m * ELEMENT_BYTES, elected);
        } else {
            for (u32 i = t; i < m; i += THREADS) ((Element*)to)[i] = ((const Element*)shared.elements)[i];
        }
        commit_stores(elected);
    }
    wait_stores_read(elected);
    if (t == 32)
        for (u32 rank = 0; rank < ranks && rank < KEPT_RANKS; ++rank)
            if (kept_digest[rank] || kept_escapes[rank]) {
                atomicAdd(&scratch->of_job[rank].digest, kept_digest[rank]);
                atomicAdd(&scratch->of_job[rank].escapes, kept_escapes[rank]);
            }
    finish_reading<ELEMENT_BYTES>(jobs, ranks, scratch, verdicts, &shared.last);
}

extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_REDUCE_BLOCKS_2)
    decode_reduce_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, u32 scale, float factor,
                                  ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2>(table, out, scale, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_REDUCE_BLOCKS_4)
    decode_reduce_float32_kernel(const __grid_constant__ JobTable table, u64 out, u32 scale, float factor,
                                 ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4>(table, out, scale, factor, scratch, verdicts);
}
extern "C" __constant__ u32 decode_reduce_shared_bytes[2] = {sizeof(ReadShared<2>), sizeof(ReadShared<4>)};
