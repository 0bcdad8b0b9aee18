// Decode and reduce: the terms of R ranks, frames or plain words, summed in rank order and written once.
//
// The sum, exactly: acc = term of rank 0; acc = fl32(acc + term); a term is fl32(x * factor) if there is a factor; at
// the end fl32(acc / ranks) if averaging; one rounding to nearest even; every NaN is 0x7FC0 (float32: 0x7FC00000). No
// contraction, no flush to zero. Decoded words never reach device memory.
#include "reader.cuh"

constexpr u32 REDUCE_STAGES = ZIPCCL_REDUCE_STAGES;
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
struct ReduceShared : ReadShared<ELEMENT_BYTES, REDUCE_STAGES> {
    u64 fixed_bytes, records;
    Rank rank[KEPT_RANKS];
    u64 tag[KEPT_RANKS];
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

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ Rank rank_of(const ReduceShared<ELEMENT_BYTES>& shared, const FrameJob* jobs, u32 rank) {
    if (rank < KEPT_RANKS) return shared.rank[rank];
    return {jobs[rank].frame, jobs[rank].words, jobs[rank].capacity_bytes};
}

// Load a term into a stage, and the window for the term that comes into it next.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void load_term(ReduceShared<ELEMENT_BYTES>& shared, u32 s, const FrameJob* jobs, u32 ranks,
                                          u32 tiles, Term term, u32 m, bool from_window) {
    if (term.tile >= tiles) return;
    const Rank job = rank_of<ELEMENT_BYTES>(shared, jobs, term.rank);
    const Term next = term.after(REDUCE_STAGES, ranks);
    const u64 next_frame = next.tile < tiles ? rank_of<ELEMENT_BYTES>(shared, jobs, next.rank).frame : 0;
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

// What `factor` does: nothing, multiply every term, divide the sum.
enum Scale { SCALE_NONE, SCALE_PREMUL, SCALE_AVERAGE };

template <u32 ELEMENT_BYTES, Scale SCALE>
__device__ __forceinline__ void reduce_tiles(const JobTable& table, u64 out, float factor, ReadScratch* scratch,
                                             Verdict* verdicts) {
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
            shared.rank[t] = {jobs[t].frame, jobs[t].words, jobs[t].capacity_bytes};
            shared.tag[t] = tag_of(jobs[t]);
        }
    }
    if (t == 0) {
        shared.fixed_bytes = static_bytes(n);
        shared.records = records_begin(n);
    }
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
        float acc[THREAD_WORDS];  // from -0 on: fl32(-0 + x) is x, whatever x is, and -0 remains -0
#pragma unroll
        for (u32 i = 0; i < THREAD_WORDS; ++i) acc[i] = -0.0f;
#pragma unroll 1
        for (u32 rank = 0; rank < ranks; ++rank) {
            const u64 tag = rank < KEPT_RANKS ? shared.tag[rank] : tag_of(jobs[rank]);
            const bool is_frame = tag != 0;
            wait_barrier(&shared.loaded[stage], phases >> stage & 1);
            phases ^= 1u << stage;

            BlockPlan plan{0};
            u32 place = u32(shared.elements - shared_bytes);  // of the elements
            if (is_frame) {
                plan = shared.plan[stage];
                rebuild_words<ELEMENT_BYTES>(shared, stage, tile, m, Codes(tag & ~FRAME_TAG),
                                             counted_phases >> stage & 1, scratch, rank);
                counted_phases ^= 1u << stage;
            } else {
                place = u32(shared.stage[stage] - shared_bytes);
                const u64 words = jobs[rank].words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
                if (!words_load_ahead<ELEMENT_BYTES>(words, m)) {
#pragma unroll 1
                    for (u32 i = first + lane; i < first + WARP_WORDS && i < m; i += 32)
                        ((Element*)(shared_bytes + place))[i] = ((const Element*)words)[i];
                    __syncwarp();
                }
            }

            u64 sum = 0;
#pragma unroll
            for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
                for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                    const uint4 x = *(const uint4*)(shared_bytes + place + chunk_offset<ELEMENT_BYTES>(slot) + q * 16);
                    sum += weighted(x, weights_of<ELEMENT_BYTES>(slot, q));
                    const u32 raw[4] = {x.x, x.y, x.z, x.w};
                    float term[16 / ELEMENT_BYTES];
#pragma unroll
                    for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i)
                        term[i] = __uint_as_float(ELEMENT_BYTES == 4 ? raw[i % 4]
                                                  : i & 1            ? raw[i / 2] & 0xffff0000u
                                                                     : raw[i / 2] << 16);
                    float* a = &acc[slot * 8 + q * (16 / ELEMENT_BYTES)];
#pragma unroll
                    for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i)
                        a[i] = __fadd_rn(a[i], SCALE == SCALE_PREMUL ? __fmul_rn(term[i], factor) : term[i]);
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

        const double divisor = factor, reciprocal = SCALE == SCALE_AVERAGE ? 1.0 / divisor : 0;
        wait_stores_read();
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
            for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q) {
                u32 x[4];
                float* a = &acc[slot * 8 + q * (16 / ELEMENT_BYTES)];
                if (SCALE == SCALE_AVERAGE) {
#pragma unroll
                    for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) a[i] = divided(a[i], divisor, reciprocal);
                }
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    if (ELEMENT_BYTES == 2) {
                        x[i] = rounded_pair(a[2 * i], a[2 * i + 1]);
                    } else {
                        x[i] = __float_as_uint(a[i]);
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
    decode_reduce_sum_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2, SCALE_NONE>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_REDUCE_BLOCKS_2)
    decode_reduce_premul_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2, SCALE_PREMUL>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_AVERAGE_BLOCKS_2)
    decode_reduce_average_bfloat16_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<2, SCALE_AVERAGE>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_REDUCE_BLOCKS_4)
    decode_reduce_sum_float32_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4, SCALE_NONE>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_REDUCE_BLOCKS_4)
    decode_reduce_premul_float32_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4, SCALE_PREMUL>(table, out, factor, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_AVERAGE_BLOCKS_4)
    decode_reduce_average_float32_kernel(const __grid_constant__ JobTable table, u64 out, float factor,
                                      ReadScratch* scratch, Verdict* verdicts) {
    reduce_tiles<4, SCALE_AVERAGE>(table, out, factor, scratch, verdicts);
}
extern "C" __constant__ u32 decode_reduce_shared_bytes[2] = {sizeof(ReduceShared<2>), sizeof(ReduceShared<4>)};
