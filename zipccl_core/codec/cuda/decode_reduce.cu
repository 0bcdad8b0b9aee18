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

// What is needed of a rank's term: where it is, and the codebook of a frame.
struct Rank {
    u64 frame, words, capacity_bytes, codebook;
};
__device__ __forceinline__ Rank rank_of_job(const FrameJob& job) {
    return {job.frame, job.words, job.capacity_bytes, job.frame ? codebook_of_frame(job.frame) : 0};
}

template <u32 ELEMENT_BYTES>
struct ReduceShared : ReadShared<ELEMENT_BYTES, REDUCE_STAGES<ELEMENT_BYTES>, 1> {
    Rank rank[KEPT_RANKS];
    u64 digest[KEPT_RANKS], escapes[KEPT_RANKS];  // the loading warp's
    uint2 codes[REDUCE_STAGES<ELEMENT_BYTES>];    // TurnedCodes of a full block; else 0
    alignas(16) u8 spread[BLOCK_WORDS];  // exponents of escapes, turned, where their words are
    // what working threads have no registers left for
    const FrameJob* jobs;
    u64 n;
    double divisor, reciprocal;  // of SCALE_AVERAGE
    u32 too_long;
};

// Two floats rounded to nearest even, as the instruction does it: a NaN becomes 0x7FFF, and no number does.
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
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
__device__ __forceinline__ Rank rank_of(const ReduceShared<ELEMENT_BYTES>& shared, u32 rank) {
    return rank < KEPT_RANKS ? shared.rank[rank] : rank_of_job(shared.jobs[rank]);
}

// The next term to load: of rank `rank`, in tile `tile`; and its directory entries, on their way.
template <u32 ELEMENT_BYTES>
struct TermLoad {
    u32 tile, rank;
    LoadSource source;  // frame 0: plain words, at `words`
    u64 words, codebook;
    Entries entries;

    __device__ __forceinline__ void ask(const ReduceShared<ELEMENT_BYTES>& shared, u32 tiles) {
        if (tile >= tiles) return;
        const Rank of = rank_of<ELEMENT_BYTES>(shared, rank);
        source.frame = of.frame;
        source.capacity_bytes = of.capacity_bytes;
        words = of.words;
        codebook = of.codebook;
        if (of.frame) entries = read_entries(source, tile);
    }
    __device__ __forceinline__ void advance(u32 ranks) {
        if (++rank == ranks) rank = 0, tile += gridDim.x;
    }
    __device__ __forceinline__ void load(ReduceShared<ELEMENT_BYTES>& shared, u32 s, u32 m) {
        if (lane_of() == 0) {
            const TurnedCodes codes(m == BLOCK_WORDS ? codebook : 0);
            shared.codes[s] = make_uint2(codes.low, codes.high);
        }
        if (source.frame) {
            load_block<ELEMENT_BYTES>(shared, s, source, tile, m, entries);
            return;
        }
        const u64 from = words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
        const u32 n_bytes = words_load_ahead<ELEMENT_BYTES>(from, m) ? m * ELEMENT_BYTES : 0;
        __syncwarp();  // all lanes have read the plan before
        if (lane_of() == 0) shared.plan[s] = {PLAN_PLAIN};
        begin_load(&shared.stages.loaded[s], n_bytes);
        load_piece(&shared.stages.loaded[s], shared.stage[s], from, n_bytes);
        end_load(&shared.stages.loaded[s]);
    }
};

// The loading warp: loads terms ahead, and judges those that the others are done with.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void feed_reducers(const JobTable& table, ReduceShared<ELEMENT_BYTES>& shared,
                                              ReadScratch* scratch) {
    const u32 ranks = table.jobs, tiles = table.tiles;
    const u64 n = shared.n;
    const u32 full_blocks = u32(n / BLOCK_WORDS), rest = u32(n % BLOCK_WORDS);
    TermLoad<ELEMENT_BYTES> load;
    load.tile = blockIdx.x;
    load.rank = 0;
    load.source = {0, static_bytes(n), records_begin(n), 0, tiles};
    load.ask(shared, tiles);
    StageCursor<REDUCE_STAGES<ELEMENT_BYTES>> cursor;
#pragma unroll 1
    for (u32 s = 0; s < REDUCE_STAGES<ELEMENT_BYTES> && load.tile < tiles; ++s) {
        load.load(shared, s, load.tile < full_blocks ? BLOCK_WORDS : rest);
        load.advance(ranks);
        load.ask(shared, tiles);
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
                load.ask(shared, tiles);
            }
            if (plan.plain()) continue;
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

// A working thread: turns terms into sums of its 32 words.
template <u32 ELEMENT_BYTES>
struct Reducer {
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    static constexpr bool SMALL = ELEMENT_BYTES == 2;

    ReduceShared<ELEMENT_BYTES>& shared;
    ReadScratch* scratch;
    Place<SMALL> place;
    StageCursor<REDUCE_STAGES<ELEMENT_BYTES>> cursor;
    u32 share;  // how often warp `lane` counts: in its lower half among all, in its upper among those before this

    __device__ __forceinline__ Reducer(ReduceShared<ELEMENT_BYTES>& shared, ReadScratch* scratch)
        : shared(shared), scratch(scratch) {
        share = place.lane() >= WARPS ? 0 : place.lane() < place.warp() ? 1 << 16 | 1 : 1;
        asm volatile("" : "+r"(share));
    }

    // A full coded block's words, in slot order, checked: as rebuild_words(), but not by way of shared memory.
    //
    // Few lanes have an escape, and its exponent is known only when all warps have said how many they have. Such a lane
    // then spreads its exponents over 32 bytes of its own, and takes them from there.
    template <class Take>
    __device__ __forceinline__ void rebuild_in_registers(u32 block, u32 rank, const Take& take_quad) {
        const u32 s = cursor.stage, lane = place.lane(), turn = place.chunk[0];  // modulo 32: 8 * rotation
        const u8* stage = shared.stage[s];
        const BlockPlan plan = shared.plan[s];
        const TurnedCodes codes(shared.codes[s].x, shared.codes[s].y);
        const u32* planes = (const u32*)(stage + BLOCK_WORDS) + place.thread;
        const u32 p0 = planes[0], p1 = planes[PLANE_BYTES / 4], p2 = planes[PLANE_BYTES / 2];
        u32 escaped = ~(p0 | p1 | p2);
        const u32 count = __popc(escaped), of_warp = __reduce_add_sync(~0u, count);
        u32* counts = &shared.stages.counts[s][lane % WARPS];
        if (lane == place.warp()) {
            *counts = of_warp;
            arrive(&shared.counted[s]);
        }
        const u32 through = warp_prefix_sum(count);
        u32 selector[8], turned[8];
        code_selectors(__funnelshift_r(p0, p0, turn), __funnelshift_r(p1, p1, turn), __funnelshift_r(p2, p2, turn),
                       selector);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) turned[i] = codes.look_up(selector[i]);

        wait_barrier(&shared.counted[s], cursor.parity);
        const u32 sums = __reduce_add_sync(~0u, *counts * share), before = sums >> 16;
        if ((sums ^ plan.packed) & 0xffff) {  // plan.size() is another
            if (place.thread == 0) report_fault(scratch, rank, FAULT_RECORD, block, sums);
        } else if (escaped) {
            const u8* from = stage + RECORD_BYTES + plan.shift() + before + through;
            u8* own = shared.spread + place.thread * THREAD_WORDS;
            ((uint4*)own)[0] = ((uint4*)own)[1] = make_uint4(0, 0, 0, 0);
            u32 coded = 0;  // the largest exponent that has a code, and one
#pragma unroll 1
            do {  // from the last to the first
                const u32 i = 31 - __clz(escaped), exponent = *--from, all = TurnedCodes::turned(exponent);
                escaped ^= 1u << i;
                own[i] = u8(all);
                if (codes.holds(all)) coded = max(coded, exponent + 1);
            } while (escaped);
            if (coded) report_fault(scratch, rank, FAULT_CANONICAL, block, coded - 1);
#pragma unroll
            for (u32 slot = 0; slot < 4; ++slot) {
                const uint2 x = *(const uint2*)(shared.spread + place.chunk[slot]);
                turned[slot * 2] |= x.x;
                turned[slot * 2 + 1] |= x.y;
            }
        }
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot) {
            const uint2 sign_mantissa = *(const uint2*)(stage + place.chunk[slot]);
            const uint2 a = join_turned(turned[slot * 2], sign_mantissa.x);
            const uint2 b = join_turned(turned[slot * 2 + 1], sign_mantissa.y);
            take_quad(slot, make_uint4(a.x, a.y, b.x, b.y));
        }
    }

    // A term's elements, in slot order, by way of shared memory: blocks of all kinds, and plain words.
    template <class Take>
    __device__ __forceinline__ void rebuild_in_shared(u32 tile, u32 rank, const Take& take_quad) {
        const u32 s = cursor.stage, lane = place.lane(), first = place.warp() * WARP_WORDS;
        const u32 m = block_words(shared.n, tile);
        const BlockPlan plan = shared.plan[s];
        const Rank of = rank_of<ELEMENT_BYTES>(shared, rank);
        u32 begin = u32(shared.elements[0] - shared.stage[0]);  // of the elements
        if (plan.plain()) {
            begin = u32(shared.stage[s] - shared.stage[0]);
            if (lane == 0) arrive(&shared.counted[s]);  // nobody waits; the phase must end all the same
            const u64 words = of.words + u64(tile) * (BLOCK_WORDS * ELEMENT_BYTES);
            if (!words_load_ahead<ELEMENT_BYTES>(words, m)) {
#pragma unroll 1
                for (u32 i = first + lane; i < first + WARP_WORDS && i < m; i += 32)
                    ((Element*)(shared.stage[0] + begin))[i] = ((const Element*)words)[i];
                __syncwarp();
            }
        } else {
            rebuild_words<ELEMENT_BYTES, 0, false>(shared, place, shared.elements[0], s, tile, m, Codes(of.codebook),
                                            cursor.parity, scratch, rank);
        }
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
            for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q)
                take_quad(slot * (ELEMENT_BYTES / 2) + q,
                          *(const uint4*)(shared.stage[0] + begin + place.chunk[slot] * ELEMENT_BYTES + q * 16));
    }

    // Whether the next term is a full coded block, once it is there.
    __device__ __forceinline__ bool next_is_coded() const {
        wait_barrier(&shared.stages.loaded[cursor.stage], cursor.parity);
        return SMALL && (shared.codes[cursor.stage].y != 0) & !shared.plan[cursor.stage].stored();
    }

    // Digest the next term, which is there, and add it to the sums, or begin them with it, if it is the FIRST.
    //
    // Word by word, and in loops of their own: that takes the fewest registers, and moves no sum between them.
    template <Scale SCALE, bool FIRST, bool CODED>
    __device__ __forceinline__ void take(u32 tile, u32 rank, float factor, float (&acc)[THREAD_WORDS]) {
        u64 sum = 0;
        const auto take_quad = [&](u32 quad, uint4 x) {
            const u32 raw[4] = {x.x, x.y, x.z, x.w};
            const u32 quads = ELEMENT_BYTES / 2;  // of a slot
            sum += weighted(x, weights_of<ELEMENT_BYTES>(place.thread, quad / quads, quad % quads));
#pragma unroll
            for (u32 i = 0; i < 16 / ELEMENT_BYTES; ++i) {
                const u32 word = raw[i * ELEMENT_BYTES / 4];
                float term = __uint_as_float(!SMALL ? word : i & 1 ? word & 0xffff0000u : word << 16);
                if (SCALE == SCALE_PREMUL) term = __fmul_rn(term, factor);
                float& to = acc[quad * (16 / ELEMENT_BYTES) + i];
                to = FIRST ? term : __fadd_rn(to, term);
            }
        };
        if constexpr (CODED)
            rebuild_in_registers(tile, rank, take_quad);
        else
            rebuild_in_shared(tile, rank, take_quad);
        shared.stages.put_sum(cursor.stage, sum);
        shared.stages.leave(cursor.stage);
        cursor.advance();
    }

    // All terms of a tile.
    template <Scale SCALE>
    __device__ __forceinline__ void take_all(u32 tile, u32 ranks, float factor, float (&acc)[THREAD_WORDS]) {
        if (next_is_coded())
            take<SCALE, true, SMALL>(tile, 0, factor, acc);
        else
            take<SCALE, true, false>(tile, 0, factor, acc);
        u32 rank = 1;
        while (rank < ranks) {
            if constexpr (SMALL) {
#pragma unroll 1
                while (next_is_coded()) {
                    take<SCALE, false, true>(tile, rank, factor, acc);
                    if (++rank == ranks) return;
                }
            } else {
                next_is_coded();
            }
            take<SCALE, false, false>(tile, rank, factor, acc);
            ++rank;
        }
    }
};

template <u32 ELEMENT_BYTES, Scale SCALE>
__device__ __forceinline__ void reduce_blocks(const JobTable& table, ReduceShared<ELEMENT_BYTES>& shared, u64 out,
                                              float factor, ReadScratch* scratch) {
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    Reducer<ELEMENT_BYTES> reducer(shared, scratch);
    const auto& place = reducer.place;
    const u32 lane = place.lane(), ranks = table.jobs, tiles = table.tiles, first = place.warp() * WARP_WORDS;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float acc[THREAD_WORDS];
        reducer.template take_all<SCALE>(tile, ranks, factor, acc);
        if (SCALE == SCALE_AVERAGE) {
#pragma unroll
            for (u32 i = 0; i < THREAD_WORDS; ++i) acc[i] = divided(acc[i], shared.divisor, shared.reciprocal);
        }
        u32 rounded[THREAD_WORDS * ELEMENT_BYTES / 4];
        bool nan = false;
#pragma unroll
        for (u32 i = 0; i < THREAD_WORDS * ELEMENT_BYTES / 4; ++i) {
            if (ELEMENT_BYTES == 2) {
                const float low = acc[2 * i % THREAD_WORDS], high = acc[(2 * i + 1) % THREAD_WORDS];
                rounded[i] = rounded_pair(low, high);
                nan |= low != low || high != high;
            } else {
                const u32 x = __float_as_uint(acc[i]);
                rounded[i] = (x & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : x;
            }
        }
        if (ELEMENT_BYTES == 2 && nan) {
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
        const u32 m = block_words(shared.n, tile);
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
    // in a register: left to itself the compiler works out anew for every access where shared memory begins
    u32 address = shared_address(shared_bytes);
    asm volatile("" : "+r"(address));
    auto& shared = *reinterpret_cast<ReduceShared<ELEMENT_BYTES>*>(__cvta_shared_to_generic(address));
    const FrameJob* jobs = table.all();
        if (threadIdx.x == 0) {
        shared.too_long = 0;
        shared.jobs = jobs;
        shared.n = jobs[0].n;
        shared.divisor = factor;
        shared.reciprocal = SCALE == SCALE_AVERAGE ? 1.0 / factor : 0;
    }
    if (threadIdx.x < KEPT_RANKS) {
        const u32 rank = threadIdx.x;
        shared.digest[rank] = shared.escapes[rank] = 0;
        if (rank < table.jobs) shared.rank[rank] = rank_of_job(jobs[rank]);
    }
    shared.init();
    for (u32 rank = threadIdx.x; rank < table.jobs; rank += BLOCK_THREADS)
        if (jobs[rank].frame && frame_bytes_of(jobs[rank].frame) > jobs[rank].capacity_bytes) shared.too_long = 1;
    __syncthreads();
    if (!shared.too_long) {
        if (warp_of() == WARPS)
            feed_reducers<ELEMENT_BYTES>(table, shared, scratch);
        else
            reduce_blocks<ELEMENT_BYTES, SCALE>(table, shared, out, factor, scratch);
    }
    finish_reading<ELEMENT_BYTES>(shared.jobs, table.jobs, scratch, verdicts, &shared.last, !shared.too_long);
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
