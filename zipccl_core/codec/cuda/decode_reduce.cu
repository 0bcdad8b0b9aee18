// Decode and reduce: the terms of R ranks, frames or plain words, summed in rank order and written once.
//
// The sum, exactly: acc = term of rank 0; acc = fl32(acc + term); a term is fl32(x * factor) if there is a factor; at
// the end fl32(acc / ranks) if averaging; one rounding to nearest even; every NaN is 0x7FC0 (float32: 0x7FC00000). No
// contraction, no flush to zero. Decoded words never reach device memory.
#include "reader.cuh"

constexpr u32 REDUCE_STAGES = 2;
// Ranks that a thread block keeps in shared memory; for more, it goes to device memory each time.
constexpr u32 KEPT_RANKS = 32;
constexpr u32 SCALE_PREMUL = 1, SCALE_AVG = 2;  // 0: neither

template <u32 ELEMENT_BYTES>
struct ReduceShared : ReadShared<ELEMENT_BYTES, REDUCE_STAGES> {
    u64 fixed_bytes, records;
    FrameJob rank[KEPT_RANKS];
    u64 codebook[KEPT_RANKS];
    u64 digest[KEPT_RANKS], escapes[KEPT_RANKS];  // of the last warps to leave, which take turns
};

__device__ __forceinline__ u32 rounded_pair(float a, float b) {
    u32 x = __float_as_uint(a), y = __float_as_uint(b);
    u32 low = (x + 0x7fff + (x >> 16 & 1)) >> 16, high = (y + 0x7fff + (y >> 16 & 1)) & 0xffff0000u;
    if ((x & 0x7fffffffu) > 0x7f800000u) low = 0x7fc0u;
    if ((y & 0x7fffffffu) > 0x7f800000u) high = 0x7fc00000u;
    return low | high;
}

// fl32(x / divisor) for a whole divisor below 2^24, without the call that a division of floats is.
//
// The correction makes the quotient in double the correctly rounded one. To round it again is safe: a quotient of such
// numbers is a midpoint of two floats, subnormal ones included, or at least 2^-48 of its size away from any.
__device__ __forceinline__ float divided(float x, double divisor, double reciprocal) {
    const double q = __dmul_rn(x, reciprocal);
    const float rounded = __double2float_rn(__fma_rn(__fma_rn(-q, divisor, double(x)), reciprocal, q));
    const bool special = (__float_as_uint(x) & 0x7fffffffu) - 1 >= 0x7f7fffffu;  // zero, infinity, NaN
    return special ? x : rounded;
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ bool words_load_ahead(u64 words, u32 m) {
    return words % 16 == 0 && m * ELEMENT_BYTES % 16 == 0;
}

// A term of a tile: rank `rank`, tile `tile`; moves on by some terms, rank by rank.
struct Term {
    u32 tile, rank;
    __device__ __forceinline__ Term after(u32 terms, u32 ranks) const {
        Term next{tile, rank + terms};
        while (next.rank >= ranks) next.rank -= ranks, next.tile += gridDim.x;
        return next;
    }
};

// Load a term into a stage, and the window for the term that comes into it next.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void load_term(ReduceShared<ELEMENT_BYTES>& shared, u32 s, const FrameJob* jobs, u32 ranks,
                                          u32 tiles, Term term, u32 m, bool from_window) {
    if (term.tile >= tiles) return;
    const FrameJob& job = term.rank < KEPT_RANKS ? shared.rank[term.rank] : jobs[term.rank];
    const Term next = term.after(REDUCE_STAGES, ranks);
    const u64 next_frame = next.tile >= tiles ? 0 : next.rank < KEPT_RANKS ? shared.rank[next.rank].frame
                                                                          : jobs[next.rank].frame;
    const u64 window = next_frame ? window_address(next_frame, next.tile) : 0;
    if (job.frame) {
        const LoadSource source{job.frame, shared.fixed_bytes, shared.records, job.capacity_bytes, tiles};
        const Entries entries =
            from_window ? window_entries(shared.window(s), source, term.tile) : read_entries(source, term.tile);
        load_block<ELEMENT_BYTES>(shared, s, source, term.tile, m, entries, window);
        return;
    }
    const u64 words = job.words + u64(term.tile) * (BLOCK_WORDS * ELEMENT_BYTES);
    const u32 n_bytes = words_load_ahead<ELEMENT_BYTES>(words, m) ? m * ELEMENT_BYTES : 0;
    begin_load(&shared.loaded[s], n_bytes + (window ? WINDOW_BYTES : 0));
    load_piece(&shared.loaded[s], shared.stage[s], words, n_bytes);
    if (window) load_piece(&shared.loaded[s], shared.window(s), window, WINDOW_BYTES);
    end_load(&shared.loaded[s]);
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void reduce_tiles(const JobTable& table, u64 out, u32 scale, float factor,
                                             ReadScratch* scratch, Verdict* verdicts) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<ReduceShared<ELEMENT_BYTES>*>(shared_bytes);
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;

    const u32 t = threadIdx.x, lane = lane_of(), warp = warp_of();
    const FrameJob* jobs = table.all();
    const u32 ranks = table.jobs, tiles = table.tiles;
    const u64 n = jobs[0].n;
    const u32 full_blocks = u32(n / BLOCK_WORDS), rest = u32(n % BLOCK_WORDS);
    if (t < KEPT_RANKS) {
        shared.digest[t] = shared.escapes[t] = 0;
        if (t < ranks) {
            shared.rank[t] = jobs[t];
            shared.codebook[t] = jobs[t].frame ? codebook_of_frame(jobs[t].frame) : 0;
        }
    }
    if (t == 0) {
        shared.fixed_bytes = static_bytes(n);
        shared.records = records_begin(n);
    }
    const Weights<ELEMENT_BYTES> weights(shared.weights);
    shared.init();
    if (warp < REDUCE_STAGES) {
        const Term term = Term{blockIdx.x, 0}.after(warp, ranks);
        load_term<ELEMENT_BYTES>(shared, warp, jobs, ranks, tiles, term, term.tile < full_blocks ? BLOCK_WORDS : rest,
                                 false);
    }

    const u32 first = warp * WARP_WORDS;
    u32 stage = 0, phases = 0, counted_phases = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 m = tile < full_blocks ? BLOCK_WORDS : rest;
        float acc[THREAD_WORDS];
#pragma unroll 1
        for (u32 rank = 0; rank < ranks; ++rank) {
            const FrameJob& job = rank < KEPT_RANKS ? shared.rank[rank] : jobs[rank];
            const bool is_frame = job.frame != 0;
            wait_barrier(&shared.loaded[stage], phases >> stage & 1);
            phases ^= 1u << stage;

            const u8* elements = shared.elements;
            BlockPlan plan{0};
            if (is_frame) {
                const Codes codes(rank < KEPT_RANKS ? shared.codebook[rank] : codebook_of_frame(job.frame));
                plan = shared.plan[stage];
                rebuild_words<ELEMENT_BYTES>(shared, stage, tile, m, codes, counted_phases >> stage & 1, scratch, rank);
                counted_phases ^= 1u << stage;
            } else {
                elements = shared.stage[stage];
                const u64 words = job.words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
                if (!words_load_ahead<ELEMENT_BYTES>(words, m)) {
#pragma unroll 1
                    for (u32 i = first + lane; i < first + WARP_WORDS && i < m; i += 32)
                        ((Element*)shared.stage[stage])[i] = ((const Element*)words)[i];
                    __syncwarp();
                }
            }

            u64 sum = 0;
#pragma unroll
            for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
                for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                    const uint4 x = *(const uint4*)(elements + chunk_offset<ELEMENT_BYTES>(slot) + q * 16);
                    sum += weighted(x, weights.of(slot, q));
                    const u32 raw[4] = {x.x, x.y, x.z, x.w};
                    float term[16 / ELEMENT_BYTES];
#pragma unroll
                    for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i)
                        term[i] = __uint_as_float(ELEMENT_BYTES == 4 ? raw[i % 4]
                                                  : i & 1            ? raw[i / 2] & 0xffff0000u
                                                                     : raw[i / 2] << 16);
                    if (scale == SCALE_PREMUL) {
#pragma unroll
                        for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) term[i] = __fmul_rn(term[i], factor);
                    }
                    float* a = &acc[slot * 8 + q * (16 / ELEMENT_BYTES)];
                    if (rank) {
#pragma unroll
                        for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) a[i] = __fadd_rn(a[i], term[i]);
                    } else {
#pragma unroll
                        for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) a[i] = term[i];
                    }
                }
            sum = warp_sum_all(sum);
            if (lane == 0) shared.sums[stage][warp] = sum;

            if (last_to_leave(&shared.left[stage])) {
                const BlockParts parts = parts_of_block<ELEMENT_BYTES>(shared, stage);
                const Term next = Term{tile, rank}.after(REDUCE_STAGES, ranks);
                load_term<ELEMENT_BYTES>(shared, stage, jobs, ranks, tiles, next,
                                         next.tile < full_blocks ? BLOCK_WORDS : rest, true);
                BlockResult result{0, 0};
                if (is_frame) result = finish_block<ELEMENT_BYTES>(parts, plan, tile, m, scratch, rank);
                if (lane == 0 && is_frame) {
                    if (rank < KEPT_RANKS) {
                        shared.digest[rank] += result.mixed;
                        shared.escapes[rank] += result.escapes;
                    } else {
                        atomicAdd(&scratch->of_job[rank].digest, result.mixed);
                        atomicAdd(&scratch->of_job[rank].escapes, u64(result.escapes));
                    }
                }
            }
            stage = stage + 1 == REDUCE_STAGES ? 0 : stage + 1;
        }

        if (scale == SCALE_AVG) {
            const double divisor = factor, reciprocal = 1.0 / divisor;
#pragma unroll
            for (u32 i = 0; i < THREAD_WORDS; ++i) acc[i] = divided(acc[i], divisor, reciprocal);
        }
        wait_stores_read();
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
        publish_to_stores();
        const u32 mine = m <= first ? 0 : m - first < WARP_WORDS ? m - first : WARP_WORDS;
        const u8* from = shared.elements + first * ELEMENT_BYTES;
        const u64 to = out + (u64(tile) * BLOCK_WORDS + first) * ELEMENT_BYTES;
        if (to % 16 == 0 && mine * ELEMENT_BYTES % 16 == 0) {
            store_piece(to, from, mine * ELEMENT_BYTES);
        } else {
#pragma unroll 1
            for (u32 i = lane; i < mine; i += 32) ((Element*)to)[i] = ((const Element*)from)[i];
            __syncwarp();
        }
        commit_stores();
    }
    wait_stores_read();
    __syncthreads();
    if (t < KEPT_RANKS && t < ranks && (shared.digest[t] || shared.escapes[t])) {
        atomicAdd(&scratch->of_job[t].digest, shared.digest[t]);
        atomicAdd(&scratch->of_job[t].escapes, shared.escapes[t]);
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
extern "C" __constant__ u32 decode_reduce_shared_bytes[2] = {sizeof(ReduceShared<2>), sizeof(ReduceShared<4>)};
