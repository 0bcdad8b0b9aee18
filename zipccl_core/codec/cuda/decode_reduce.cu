// Decode and reduce: the terms of R ranks, frames or plain words, summed in rank order and written once.
//
// The sum, exactly: acc = term of rank 0; acc = fl32(acc + term); a term is fl32(x * factor) if there is a factor; at
// the end fl32(acc / ranks) if averaging; one rounding to nearest even; every NaN is 0x7FC0 (float32: 0x7FC00000). No
// contraction, no flush to zero. Decoded words never reach device memory.
//
// If a frame says that it is longer than its buffer, nothing is written, not even where `out` is one of the terms: then
// the rest can be received, and all be summed.
#include "reader.cuh"

template <u32 ELEMENT_BYTES>
constexpr u32 REDUCE_STAGES = ELEMENT_BYTES == 2 ? ZIPCCL_REDUCE_STAGES : 2;
// Ranks that a thread block keeps in shared memory; for more, it goes to device memory each time.
constexpr u32 KEPT_RANKS = 32;

constexpr u64 FRAME_TAG = 1ull << 63;

// What readers need of a rank's term: the codebook of a frame, and FRAME_TAG; of plain words 0.
__device__ __forceinline__ u64 tag_of(const FrameJob& job) {
    return job.frame ? codebook_of_frame(job.frame) | FRAME_TAG : 0;
}

// What loaders need of it.
struct Rank {
    u64 frame, words, capacity_bytes;
};

template <u32 ELEMENT_BYTES>
struct ReduceShared : ReadShared<ELEMENT_BYTES, REDUCE_STAGES<ELEMENT_BYTES>, 1> {
    Rank rank[KEPT_RANKS];
    u64 tag[KEPT_RANKS];
    u64 digest[KEPT_RANKS], escapes[KEPT_RANKS];  // the loading warp's
    u32 too_long;
};

// Two floats rounded to nearest even, as the instruction does it: a NaN becomes 0x7FFF, and no number does.
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// Not zero in its bits 15 and 31 only if one of the pair is 0x7FFF.
__device__ __forceinline__ u32 nan_mark(u32 pair) {
    const u32 x = pair ^ 0x7fff7fffu;
    return (x - 0x00010001u) & ~x;
}
__device__ __forceinline__ u32 ordinary_nans(u32 pair) {
    if ((pair & 0xffff) == 0x7fff) pair ^= 0x7fff ^ 0x7fc0;
    if (pair >> 16 == 0x7fff) pair ^= (0x7fff ^ 0x7fc0) << 16;
    return pair;
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

// What `factor` does: nothing, multiply every term, divide the sum.
enum Scale { SCALE_NONE, SCALE_PREMUL, SCALE_AVERAGE };

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ Rank rank_of(const ReduceShared<ELEMENT_BYTES>& shared, const FrameJob* jobs, u32 rank) {
    if (rank < KEPT_RANKS) return shared.rank[rank];
    return {jobs[rank].frame, jobs[rank].words, jobs[rank].capacity_bytes};
}

// The next term to load: of rank `rank`, in tile `tile`; and its directory entries, on their way.
template <u32 ELEMENT_BYTES>
struct TermLoad {
    u32 tile, rank;
    LoadSource source;  // frame 0: plain words, at `words`
    u64 words;
    Entries entries;

    __device__ __forceinline__ void ask(const ReduceShared<ELEMENT_BYTES>& shared, const FrameJob* jobs, u32 tiles) {
        if (tile >= tiles) return;
        const Rank of = rank_of<ELEMENT_BYTES>(shared, jobs, rank);
        source.frame = of.frame;
        source.capacity_bytes = of.capacity_bytes;
        words = of.words;
        if (of.frame) entries = read_entries(source, tile);
    }
    __device__ __forceinline__ void advance(u32 ranks) {
        if (++rank == ranks) rank = 0, tile += gridDim.x;
    }
    __device__ __forceinline__ void load(ReduceShared<ELEMENT_BYTES>& shared, u32 s, u32 m) {
        if (source.frame) {
            load_block<ELEMENT_BYTES>(shared, s, source, tile, m, entries);
            return;
        }
        const u64 from = words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
        const u32 n_bytes = words_load_ahead<ELEMENT_BYTES>(from, m) ? m * ELEMENT_BYTES : 0;
        begin_load(&shared.stages.loaded[s], n_bytes);
        load_piece(&shared.stages.loaded[s], shared.stage[s], from, n_bytes);
        end_load(&shared.stages.loaded[s]);
    }
};

// The loading warp: loads terms ahead, and judges those that the others are done with.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void feed_reducers(const JobTable& table, ReduceShared<ELEMENT_BYTES>& shared,
                                              ReadScratch* scratch) {
    const FrameJob* jobs = table.all();
    const u32 ranks = table.jobs, tiles = table.tiles;
    const u64 n = jobs[0].n;
    const u32 full_blocks = u32(n / BLOCK_WORDS), rest = u32(n % BLOCK_WORDS);
    TermLoad<ELEMENT_BYTES> load;
    load.tile = blockIdx.x;
    load.rank = 0;
    load.source = {0, static_bytes(n), records_begin(n), 0, tiles};
    load.ask(shared, jobs, tiles);
    StageCursor<REDUCE_STAGES<ELEMENT_BYTES>> cursor;
#pragma unroll 1
    for (u32 s = 0; s < REDUCE_STAGES<ELEMENT_BYTES> && load.tile < tiles; ++s) {
        load.load(shared, s, load.tile < full_blocks ? BLOCK_WORDS : rest);
        load.advance(ranks);
        load.ask(shared, jobs, tiles);
    }
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x)
        for (u32 rank = 0; rank < ranks; ++rank, cursor.advance()) {
            const u32 s = cursor.stage;
            wait_barrier(&shared.stages.empty[s], cursor.parity);
            const BlockPlan plan = shared.plan[s];
            const BlockParts parts = parts_of_block<ELEMENT_BYTES>(shared, s);
            if (load.tile < tiles) {
                load.load(shared, s, load.tile < full_blocks ? BLOCK_WORDS : rest);
                load.advance(ranks);
                load.ask(shared, jobs, tiles);
            }
            if (!(rank < KEPT_RANKS ? shared.tag[rank] : jobs[rank].frame)) continue;
            const u32 m = tile < full_blocks ? BLOCK_WORDS : rest;
            const BlockResult result = finish_block<ELEMENT_BYTES>(parts, plan, tile, m, scratch, rank);
            if (lane_of()) continue;
            if (rank < KEPT_RANKS) {
                shared.digest[rank] += result.mixed;
                shared.escapes[rank] += result.escapes;
            } else {
                add_to_job(scratch, rank, result.mixed, result.escapes);
            }
        }
    __syncwarp();
    for (u32 rank = lane_of(); rank < KEPT_RANKS && rank < ranks; rank += 32)
        if (shared.digest[rank] || shared.escapes[rank])
            add_to_job(scratch, rank, shared.digest[rank], shared.escapes[rank]);
}

template <u32 ELEMENT_BYTES, Scale SCALE>
__device__ __forceinline__ void reduce_blocks(const JobTable& table, ReduceShared<ELEMENT_BYTES>& shared, u64 out,
                                              float factor, ReadScratch* scratch) {
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    const FrameJob* jobs = table.all();
    const Place<ELEMENT_BYTES == 2> place;
    const u32 lane = place.lane(), warp = place.warp(), ranks = table.jobs, tiles = table.tiles;
    const u64 n = jobs[0].n;
    const u32 full_blocks = u32(n / BLOCK_WORDS), rest = u32(n % BLOCK_WORDS), first = warp * WARP_WORDS;
    const double divisor = factor, reciprocal = SCALE == SCALE_AVERAGE ? 1.0 / divisor : 0;
    StageCursor<REDUCE_STAGES<ELEMENT_BYTES>> cursor;
    u32 counted = 0;  // parity of each stage's counts: plain words have none
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 m = tile < full_blocks ? BLOCK_WORDS : rest;
        float acc[THREAD_WORDS];  // from -0 on: fl32(-0 + x) is x, whatever x is, and -0 remains -0
#pragma unroll
        for (u32 i = 0; i < THREAD_WORDS; ++i) acc[i] = -0.0f;
#pragma unroll 1
        for (u32 rank = 0; rank < ranks; ++rank, cursor.advance()) {
            const u32 stage = cursor.stage;
            const u64 tag = rank < KEPT_RANKS ? shared.tag[rank] : tag_of(jobs[rank]);
            wait_barrier(&shared.stages.loaded[stage], cursor.parity);
            u32 begin = u32(shared.elements[0] - shared.stage[0]);  // of the elements
            if (tag) {
                rebuild_words<ELEMENT_BYTES, 0>(shared, place, shared.elements[0], stage, tile, m,
                                                Codes(tag & ~FRAME_TAG), counted >> stage & 1, scratch, rank);
                counted ^= 1u << stage;
            } else {
                begin = u32(shared.stage[stage] - shared.stage[0]);
                const u64 words = jobs[rank].words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
                if (!words_load_ahead<ELEMENT_BYTES>(words, m)) {
#pragma unroll 1
                    for (u32 i = first + lane; i < first + WARP_WORDS && i < m; i += 32)
                        ((Element*)(shared.stage[0] + begin))[i] = ((const Element*)words)[i];
                    __syncwarp();
                }
            }

            u64 sum = 0;
#pragma unroll
            for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
                for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                    const uint4 x =
                        *(const uint4*)(shared.stage[0] + begin + place.chunk[slot] * ELEMENT_BYTES + q * 16);
                    sum += weighted(x, weights_of<ELEMENT_BYTES>(place.thread, slot, q));
                    const u32 raw[4] = {x.x, x.y, x.z, x.w};
                    float* a = &acc[slot * 8 + q * (16 / ELEMENT_BYTES)];
#pragma unroll
                    for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) {
                        const float term = __uint_as_float(ELEMENT_BYTES == 4 ? raw[i % 4]
                                                           : i & 1            ? raw[i / 2] & 0xffff0000u
                                                                              : raw[i / 2] << 16);
                        a[i] = __fadd_rn(a[i], SCALE == SCALE_PREMUL ? __fmul_rn(term, factor) : term);
                    }
                }
            shared.stages.put_sum(stage, sum);
            shared.stages.leave(stage);
        }

        if (SCALE == SCALE_AVERAGE) {
#pragma unroll
            for (u32 i = 0; i < THREAD_WORDS; ++i) acc[i] = divided(acc[i], divisor, reciprocal);
        }
        u32 rounded[THREAD_WORDS * ELEMENT_BYTES / 4], marks = 0;
#pragma unroll
        for (u32 i = 0; i < THREAD_WORDS * ELEMENT_BYTES / 4; ++i) {
            if (ELEMENT_BYTES == 2) {
                rounded[i] = rounded_pair(acc[2 * i % THREAD_WORDS], acc[(2 * i + 1) % THREAD_WORDS]);
                marks |= nan_mark(rounded[i]);
            } else {
                const u32 x = __float_as_uint(acc[i]);
                rounded[i] = (x & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : x;
            }
        }
        if (ELEMENT_BYTES == 2 && marks & 0x80008000u) {
#pragma unroll
            for (u32 i = 0; i < THREAD_WORDS / 2; ++i) rounded[i % (THREAD_WORDS * ELEMENT_BYTES / 4)] =
                ordinary_nans(rounded[i % (THREAD_WORDS * ELEMENT_BYTES / 4)]);
        }
        wait_stores_read();
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
            for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                const u32* x = &rounded[(slot * (ELEMENT_BYTES / 2) + q) * 4];
                *(uint4*)(shared.elements[0] + place.chunk[slot] * ELEMENT_BYTES + q * 16) =
                    make_uint4(x[0], x[1], x[2], x[3]);
            }
        publish_to_stores();
        const u32 mine = m <= first ? 0 : m - first < WARP_WORDS ? m - first : WARP_WORDS;
        const u8* from = shared.elements[0] + first * ELEMENT_BYTES;
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
}

template <u32 ELEMENT_BYTES, Scale SCALE>
__device__ __forceinline__ void reduce_tiles(const JobTable& table, u64 out, float factor, ReadScratch* scratch,
                                             Verdict* verdicts) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<ReduceShared<ELEMENT_BYTES>*>(shared_bytes);
    const FrameJob* jobs = table.all();
    if (threadIdx.x == 0) shared.too_long = 0;
    if (threadIdx.x < KEPT_RANKS) {
        const u32 rank = threadIdx.x;
        shared.digest[rank] = shared.escapes[rank] = 0;
        if (rank < table.jobs) {
            shared.rank[rank] = {jobs[rank].frame, jobs[rank].words, jobs[rank].capacity_bytes};
            shared.tag[rank] = tag_of(jobs[rank]);
        }
    }
    shared.init();
    for (u32 rank = threadIdx.x; rank < table.jobs; rank += BLOCK_THREADS)
        if (jobs[rank].frame && frame_bytes_of(jobs[rank].frame) > jobs[rank].capacity_bytes) shared.too_long = 1;
    __syncthreads();
    const bool reads = !shared.too_long;
    if (reads && warp_of() == WARPS)
        feed_reducers<ELEMENT_BYTES>(table, shared, scratch);
    else if (reads)
        reduce_blocks<ELEMENT_BYTES, SCALE>(table, shared, out, factor, scratch);
    finish_reading<ELEMENT_BYTES>(jobs, table.jobs, scratch, verdicts, &shared.last, reads);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_REDUCE_BLOCKS_2)
    decode_reduce_sum_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2, SCALE_NONE>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_REDUCE_BLOCKS_2)
    decode_reduce_premul_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2, SCALE_PREMUL>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_REDUCE_BLOCKS_2)
    decode_reduce_average_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2, SCALE_AVERAGE>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_REDUCE_BLOCKS_4)
    decode_reduce_sum_float32_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4, SCALE_NONE>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_REDUCE_BLOCKS_4)
    decode_reduce_premul_float32_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4, SCALE_PREMUL>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_REDUCE_BLOCKS_4)
    decode_reduce_average_float32_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4, SCALE_AVERAGE>(table, out, factor, scratch, verdicts);
}
extern "C" __constant__ u32 decode_reduce_shared_bytes[2] = {sizeof(ReduceShared<2>), sizeof(ReduceShared<4>)};
