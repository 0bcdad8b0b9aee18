// Reading blocks of frames that nobody vouches for (FORMAT.md 8): shared by decode.cu and decode_reduce.cu.
//
// Geometry comes from the job, which the host made from the tensors it was given, never from the frame. What the frame
// says about a block (offset, size, flags) is checked against the buffer before it becomes an address. A block that
// fails a check is a fault in the accumulators; its words are whatever came out, inside the block's own place.
#pragma once
#include "layout.cuh"
#include "pipeline.cuh"
#include "planes.cuh"

constexpr u32 WARP_WORDS = BLOCK_WORDS / WARPS;

// Steps of FORMAT.md 8 that a verdict can name; jit.py has the same list.
constexpr u32 FAULT_DIRECTORY = 9, FAULT_RECORD = 10, FAULT_CANONICAL = 11, FAULT_DIGEST = 12, FAULT_OTHER_FRAME = 20;

// Per job, zero before and after every launch: the launch that reads them puts them back.
struct ReadAccumulators {
    u64 digest, escapes, fault, reserved;
};
// Scratch of a launch: a counter of finished thread blocks, then ReadAccumulators[jobs].
struct ReadScratch {
    u64 finished_blocks, reserved[3];
    ReadAccumulators of_job[1];
};
// A job's answer: 24 numbers.
struct Verdict {
    u64 step, block, detail, digest, escapes, capacity_bytes, n, element_bytes;
    u64 header[16];
};
static_assert(sizeof(Verdict) == ZIPCCL_VERDICT_BYTES, "jit.py reads this");

// Keep the first fault: of the lowest step, then of the lowest block.
__device__ __forceinline__ void report_fault(ReadAccumulators& of_job, u32 step, u64 block, u32 detail) {
    atomicMax(&of_job.fault, u64(63 - step) << 58 | (((1ull << 42) - 1) - block) << 16 | (detail & 0xffff));
}

// What is loaded of a block, as its readers need it; in shared memory, one a stage.
struct BlockPlan {
    u32 size;   // bytes of the dynamic part; 0 if faulty
    u32 shift;  // where they begin behind the record in the stage
    u32 stored, low, faulty;
};

// Two directory entries; of the last block, the second is Frame_Bytes.
struct Entries {
    u64 own, next;
};

constexpr u32 WINDOW_BYTES = 32;  // around two directory entries, at a multiple of 16

template <u32 ELEMENT_BYTES, u32 STAGES>
struct ReadShared {
    static constexpr u32 MOST_DYNAMIC = SPILL_BYTES + (ELEMENT_BYTES == 4 ? 2 * BLOCK_WORDS : 0) + 32;
    static constexpr u32 STAGE_BYTES = u32(RECORD_BYTES + MOST_DYNAMIC + WINDOW_BYTES + 127) / 128 * 128;
    static_assert(RECORD_BYTES + MOST_DYNAMIC >= BLOCK_WORDS * ELEMENT_BYTES, "a stage also holds plain words");
    u8 stage[STAGES][STAGE_BYTES];
    u8 elements[BLOCK_WORDS * ELEMENT_BYTES];
    WeightTable<ELEMENT_BYTES> weights;
    BlockPlan plan[STAGES];
    u64 loaded[STAGES], counted[STAGES];  // mbarriers
    u64 sums[STAGES][WARPS];
    u32 counts[STAGES][WARPS];
    u32 lows[STAGES][WARPS];
    u32 left[STAGES];
    u32 last;

    __device__ __forceinline__ u8* window(u32 s) { return stage[s] + RECORD_BYTES + MOST_DYNAMIC; }

    // All threads; ends with a block barrier.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (u32 s = 0; s < STAGES; ++s) {
                init_barrier(&loaded[s], LOAD_ARRIVALS);
                init_barrier(&counted[s], WARPS);
                left[s] = 0;
            }
            publish_barriers();
        }
        __syncthreads();
    }
};

__device__ __forceinline__ u64 directory_entry(const FrameJob& job, u64 block) {
    return *(const volatile u64*)(job.frame + HEADER_BYTES + ENTRY_BYTES * block);
}
__device__ __forceinline__ u64 frame_bytes_of(const FrameJob& job) { return ((const volatile u64*)job.frame)[2]; }
__device__ __forceinline__ u64 codebook_of_frame(const FrameJob& job) {
    return ((const volatile u64*)job.frame)[8] & ((1ull << 56) - 1);
}

// Entries straight from device memory.
__device__ __forceinline__ Entries read_entries(const FrameJob& job, u64 block) {
    return {directory_entry(job, block),
            block + 1 < job.tiles ? directory_entry(job, block + 1) : frame_bytes_of(job)};
}
// Entries from a window that was loaded with an earlier block.
__device__ __forceinline__ Entries window_entries(const u8* window, const FrameJob& job, u64 block) {
    const u64* entries = (const u64*)window + (block & 1);
    return {entries[0], block + 1 < job.tiles ? entries[1] : frame_bytes_of(job)};
}
// Where the window of a block's entries begins: inside the static part, whatever follows the directory.
__device__ __forceinline__ u64 window_address(const FrameJob& job, u64 block) {
    return job.frame + HEADER_BYTES + ENTRY_BYTES * (block & ~1ull);
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ BlockPlan plan_block(const FrameJob& job, u64 block, u32 m, u64 fixed, Entries entries) {
    const u64 room = job.capacity_bytes - fixed;  // the host checked capacity >= fixed
    const u64 offset = entries.own & OFFSET_MASK;
    const u64 end = block + 1 < job.tiles ? entries.next & OFFSET_MASK : entries.next - fixed;
    BlockPlan plan;
    plan.stored = u32(entries.own >> 56) & 1;
    plan.low = u32(entries.own >> 57) & 1;
    plan.faulty = (entries.own & RESERVED_BITS) != 0 || (ELEMENT_BYTES == 2 && plan.low) || (block == 0 && offset) ||
                  end < offset || end > room || end - offset > spill_bytes(m) + (ELEMENT_BYTES == 4 ? 2 * m : 0);
    plan.size = plan.faulty ? 0 : u32(end - offset);
    plan.shift = plan.faulty ? 0 : u32(fixed + offset) & 15;
    if (plan.faulty) plan.stored = plan.low = 0;
    return plan;
}

// Load the record and the dynamic part of a block: whole 16-byte pieces, but no byte beyond the buffer; and a window of
// the directory for the block that will be loaded into this stage next (0: none). By one warp.
template <u32 ELEMENT_BYTES, u32 STAGES>
__device__ __forceinline__ void load_block(ReadShared<ELEMENT_BYTES, STAGES>& shared, u32 s, const FrameJob& job,
                                           u64 block, Entries entries, u64 next_window) {
    const u32 m = block_words(job.n, block), record = u32(align128(record_bytes(m)));
    const u64 fixed = static_bytes(job.n);
    const BlockPlan plan = plan_block<ELEMENT_BYTES>(job, block, m, fixed, entries);
    u8* stage = shared.stage[s];
    __syncwarp();
    const u64 from = job.frame + fixed + (entries.own & OFFSET_MASK) - plan.shift;
    u32 whole = 0;
    if (plan.size) {
        whole = (plan.shift + plan.size + 15) & ~15u;
        const u64 buffer_end = job.frame + job.capacity_bytes;
        if (from + whole > buffer_end) {  // the last bytes of a buffer that ends with the frame, one by one
            whole = u32(buffer_end - from) & ~15u;
            if (lane_of() == 0)
                for (u32 i = whole; i < plan.shift + plan.size; ++i)
                    stage[RECORD_BYTES + i] = *(const u8*)(from + i);
        }
    }
    if (lane_of() == 0) shared.plan[s] = plan;
    begin_load(&shared.loaded[s], record + whole + (next_window ? WINDOW_BYTES : 0));
    load_piece(&shared.loaded[s], stage, job.frame + records_begin(job.n) + block * RECORD_BYTES, record);
    load_piece(&shared.loaded[s], stage + RECORD_BYTES, from, whole);
    if (next_window) load_piece(&shared.loaded[s], shared.window(s), next_window, WINDOW_BYTES);
    end_load(&shared.loaded[s]);
}

__device__ __forceinline__ u32 load_shared_unaligned(const u8* p) {
    u64 address = (u64)p;
    const u32* words = (const u32*)(address & ~3ull);
    u32 shift = u32(address & 3) * 8;
    return shift ? __funnelshift_r(words[0], words[1], shift) : words[0];
}

// Four bytes of a plane of a short block, from `first` on; zero beyond it.
__device__ __forceinline__ u32 short_plane(const u8* plane, u32 plane_bytes, u32 first) {
    u32 x = 0;
#pragma unroll
    for (u32 k = 0; k < 4; ++k)
        if (first + k < plane_bytes) x |= u32(plane[first + k]) << (8 * k);
    return x;
}

// Low halves of a warp's words, at any alignment, into its elements.
__device__ __forceinline__ u32 add_low_halves(u8* elements, const u8* low_halves, u32 m) {
    u32 seen = 0;
#pragma unroll 4
    for (u32 k = 0; k < THREAD_WORDS; ++k) {
        const u32 i = warp_of() * WARP_WORDS + k * 32 + lane_of();
        if (i < m) {
            const u8* at = low_halves + 2 * i;
            const u32 half = at[0] | at[1] << 8;
            seen |= half;
            ((u32*)elements)[i] |= half;
        }
    }
    return seen;
}

// Rebuild a warp's eighth of a block from a stage into shared.elements, and check it (FORMAT.md 8.10, 8.11). All lanes.
//
// A warp waits for the others only to learn how many escapes precede its own: it says its number early, and asks for
// theirs late. After it any lane may read any of the warp's elements.
template <u32 ELEMENT_BYTES, u32 STAGES>
__device__ __forceinline__ void rebuild_words(ReadShared<ELEMENT_BYTES, STAGES>& shared, u32 s, u64 block, u32 m,
                                              const Codes& codes, u32 counted_parity, ReadAccumulators& of_job) {
    const u32 t = threadIdx.x, lane = lane_of(), warp = warp_of(), rotation = slot_rotation();
    const u8* stage = shared.stage[s];
    u8* elements = shared.elements;
    const BlockPlan plan = shared.plan[s];
    const u8* dynamic = stage + RECORD_BYTES + plan.shift;
    const u32 spill = spill_bytes(m), low_bytes = plan.low ? 2 * m : 0;
    u32 low_seen = 0;

    if (m < BLOCK_WORDS && warp == 0) {  // once a frame
        const u32 record = record_bytes(m), held = plan.stored && 2 * m < record ? 2 * m : record;
        for (u32 i = held + lane; i < u32(align128(record)); i += 32)
            if (stage[i]) report_fault(of_job, FAULT_RECORD, block, i);
    }
    if (!plan.stored) {
        const u32 valid = valid_words(m);
        u32 p0, p1, p2;
        if (m == BLOCK_WORDS) {
            const u32* planes = (const u32*)(stage + BLOCK_WORDS) + t;
            p0 = planes[0], p1 = planes[PLANE_BYTES / 4], p2 = planes[2 * PLANE_BYTES / 4];
        } else {
            const u32 plane_bytes = (m + 7) / 8;
            p0 = short_plane(stage + m, plane_bytes, t * 4);
            p1 = short_plane(stage + m + plane_bytes, plane_bytes, t * 4);
            p2 = short_plane(stage + m + 2 * plane_bytes, plane_bytes, t * 4);
            if ((p0 | p1 | p2) & ~valid) report_fault(of_job, FAULT_RECORD, block, t);
        }
        u32 escaped = ~(p0 | p1 | p2) & valid;
        const u32 count = __popc(escaped);
        const u32 inclusive = warp_inclusive_sum(count);
        const u32 of_warp = __shfl_sync(~0u, inclusive, 31);
        if (lane == 0) {
            shared.counts[s][warp] = of_warp;
            arrive(&shared.counted[s]);
        }

        u32 sign_mantissa[8], v[16];
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot) {
            const u32 at = t * 32 + ((slot + rotation) & 3) * 8;
            if (m == BLOCK_WORDS) {
                const uint2 x = *(const uint2*)(stage + at);
                sign_mantissa[slot * 2] = x.x, sign_mantissa[slot * 2 + 1] = x.y;
            } else {
                sign_mantissa[slot * 2] = short_plane(stage, m, at);
                sign_mantissa[slot * 2 + 1] = short_plane(stage, m, at + 4);
            }
        }
        join_words(__funnelshift_r(p0, p0, 8 * rotation), __funnelshift_r(p1, p1, 8 * rotation),
                   __funnelshift_r(p2, p2, 8 * rotation), codes, sign_mantissa, v);
        wait_stores_read();
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot) {
            uint4* to = (uint4*)(elements + chunk_offset<ELEMENT_BYTES>(slot));
            if (ELEMENT_BYTES == 2) {
                to[0] = make_uint4(v[slot * 4], v[slot * 4 + 1], v[slot * 4 + 2], v[slot * 4 + 3]);
            } else {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    u32 a = v[slot * 4 + half * 2], b = v[slot * 4 + half * 2 + 1];
                    to[half] = make_uint4(a << 16, a & 0xffff0000u, b << 16, b & 0xffff0000u);
                }
            }
        }

        wait_barrier(&shared.counted[s], counted_parity);
        const u32 theirs = lane < WARPS ? shared.counts[s][lane] : 0;
        const u32 before = __reduce_add_sync(~0u, lane < warp ? theirs : 0);
        const u32 total = __reduce_add_sync(~0u, theirs);
        const bool sized = plan.size == total + low_bytes;
        if (!sized) {
            if (t == 0 && !plan.faulty)
                report_fault(of_job, total > spill ? FAULT_CANONICAL : FAULT_RECORD, block, total);
        } else {
            const u8* from = dynamic + before;
            for (u32 i = lane; i < of_warp; i += 32)
                if (codes.holds(from[i])) report_fault(of_job, FAULT_CANONICAL, block, from[i]);
            from += inclusive - count;
            u32* mine = (u32*)(elements + t * (THREAD_WORDS * ELEMENT_BYTES));
            while (escaped) {  // exponents of escapes are still zero
                const u32 i = __ffs(escaped) - 1;
                escaped &= escaped - 1;
                const u32 exponent = *from++;
                if (ELEMENT_BYTES == 2)
                    atomicOr(mine + (i >> 1), exponent << (7 + 16 * (i & 1)));
                else
                    atomicOr(mine + i, exponent << 23);
            }
            if (ELEMENT_BYTES == 4 && plan.low) {
                __syncwarp();
                low_seen = add_low_halves(elements, dynamic + total, m);
            }
        }
    } else {
        if (lane == 0) arrive(&shared.counted[s]);  // nobody waits; the phase must end all the same
        const bool sized = plan.size == spill + low_bytes;
        if (!sized && t == 0) report_fault(of_job, FAULT_RECORD, block, plan.size);
        wait_stores_read();
        const u32 record = record_bytes(m), held = 2 * m < record ? 2 * m : record;
        u32 escapes = 0;
#pragma unroll 1
        for (u32 k = 0; k < THREAD_WORDS; k += 2) {  // two words a lane
            const u32 i = warp * WARP_WORDS + k * 32 + lane * 2;
            u32 x = 0;
            if (m == BLOCK_WORDS) {
                if (2 * i < RECORD_BYTES)
                    x = *(const u32*)(stage + 2 * i);
                else if (sized)
                    x = load_shared_unaligned(dynamic + 2 * i - RECORD_BYTES);
            } else {
#pragma unroll
                for (u32 b = 0; b < 4; ++b) {
                    const u32 at = 2 * i + b;
                    if (at < 2 * m) x |= u32(at < held ? stage[at] : sized ? dynamic[at - held] : 0) << (8 * b);
                }
            }
            if (i < m) escapes += !codes.holds(x >> 7 & 0xff);
            if (i + 1 < m) escapes += !codes.holds(x >> 23 & 0xff);
            if (ELEMENT_BYTES == 2)
                ((u32*)elements)[i / 2] = x;
            else
                *(uint2*)(elements + 4 * i) = make_uint2(x << 16, x & 0xffff0000u);
        }
        escapes = __reduce_add_sync(~0u, escapes);
        if (lane == 0) shared.counts[s][warp] = escapes;
        __syncwarp();
        if (ELEMENT_BYTES == 4 && plan.low && sized) low_seen = add_low_halves(elements, dynamic + spill, m);
    }
    if (ELEMENT_BYTES == 4) {
        low_seen = __any_sync(~0u, low_seen != 0);
        if (lane == 0) shared.lows[s][warp] = low_seen;
    }
    __syncwarp();
}

// What the last warp to leave a stage does about the block that was in it: its digest sum, mixed, and its escapes.
struct BlockResult {
    u64 mixed;
    u32 escapes;
};
template <u32 ELEMENT_BYTES, u32 STAGES>
__device__ __forceinline__ BlockResult finish_block(const ReadShared<ELEMENT_BYTES, STAGES>& shared, u32 s, u64 block,
                                                    u32 m, ReadAccumulators& of_job) {
    const u32 lane = lane_of();
    const u64 sum = warp_sum_all(lane < WARPS ? shared.sums[s][lane] : 0);
    const u32 escapes = __reduce_add_sync(~0u, lane < WARPS ? shared.counts[s][lane] : 0);
    const BlockPlan plan = shared.plan[s];
    const u32 low = ELEMENT_BYTES == 4 ? __reduce_or_sync(~0u, lane < WARPS ? shared.lows[s][lane] : 0) : 0;
    if (lane == 0) {
        if (plan.faulty) report_fault(of_job, FAULT_DIRECTORY, block, 0);
        if (plan.stored && escapes <= spill_bytes(m)) report_fault(of_job, FAULT_CANONICAL, block, escapes);
        if (ELEMENT_BYTES == 4 && plan.low && !low) report_fault(of_job, FAULT_CANONICAL, block, 0);
    }
    return {mixed_block_sum(sum, block), escapes};
}

// FORMAT.md 8.2-8.8 on the device: the step that fails, or 0.
__device__ __forceinline__ u32 check_header(const u64* h, u64 capacity_bytes) {
    if (u32(h[0]) != ZIPCCL_MAGIC) return 2;
    if ((h[0] >> 32 & 0xffff) != ZIPCCL_FORMAT_VERSION) return 3;
    if (h[15] != header_check(h)) return 4;
    const u32 dtype = u32(h[0] >> 48 & 0xff), scheme = u32(h[0] >> 56);
    if ((dtype != dtype_of(2) && dtype != dtype_of(4)) || scheme != ZIPCCL_SCHEME_FAST) return 5;
    if (h[5] != BLOCK_WORDS || h[6] || h[7] || h[8] >> 56) return 6;
    for (u32 i = 0; i < 6; ++i)
        if ((h[8] >> (8 * i) & 0xff) >= (h[8] >> (8 * i + 8) & 0xff)) return 6;
    for (u32 i = 9; i < 15; ++i)
        if (h[i]) return 6;
    if (h[1] >= 1ull << 48) return 7;
    if (h[2] < static_bytes(h[1]) || h[2] > max_frame_bytes(h[1], dtype == dtype_of(4) ? 4 : 2)) return 7;
    if (h[4] > h[1]) return 7;
    if (h[2] > capacity_bytes) return 8;
    return 0;
}

// The verdict on one frame, by one thread of the last thread block; puts the accumulators back to zero.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void give_verdict(const FrameJob& job, ReadAccumulators& of_job, Verdict& verdict) {
    const volatile ReadAccumulators& seen = of_job;
    const u64 digest = seen.digest + mix64(4 * job.n + dtype_of(ELEMENT_BYTES));
    const u64 escapes = seen.escapes, fault = seen.fault;
    of_job = {0, 0, 0, 0};
    u64 step = 0, block = 0, detail = 0;
    if (job.frame) {
        u64 h[16];
#pragma unroll
        for (u32 i = 0; i < 16; ++i) verdict.header[i] = h[i] = ((const volatile u64*)job.frame)[i];
        step = check_header(h, job.capacity_bytes);
        const bool ours = h[1] == job.n && u32(h[0] >> 48 & 0xff) == dtype_of(ELEMENT_BYTES);
        if (!step && !ours) step = FAULT_OTHER_FRAME;
        if (!step && fault) {
            step = 63 - (fault >> 58);
            block = ((1ull << 42) - 1) - (fault >> 16 & ((1ull << 42) - 1));
            detail = fault & 0xffff;
        }
        if (!step) {
            const u64 blocks = block_count(job.n);
            for (u64 i = blocks; i < align128(ENTRY_BYTES * blocks) / ENTRY_BYTES && !step; ++i)
                if (((const volatile u64*)(job.frame + HEADER_BYTES))[i]) step = FAULT_DIRECTORY, block = i;
        }
        if (!step && escapes != h[4]) step = FAULT_CANONICAL, detail = 0xffff;
        if (!step && digest != h[3]) step = FAULT_DIGEST;
        // n = 0: no block says where the dynamic part ends; there is none (8.7 made Frame_Bytes fit)
    } else {
        for (u32 i = 0; i < 16; ++i) verdict.header[i] = 0;
    }
    verdict.step = step;
    verdict.block = block;
    verdict.detail = detail;
    verdict.digest = digest;
    verdict.escapes = escapes;
    verdict.capacity_bytes = job.capacity_bytes;
    verdict.n = job.n;
    verdict.element_bytes = ELEMENT_BYTES;
}

// At the end of a launch; all threads call. The last thread block to come gives all verdicts.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void finish_reading(const FrameJob* jobs, u32 n_jobs, ReadScratch* scratch,
                                               Verdict* verdicts, u32* shared_last) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *shared_last = atomicAdd(&scratch->finished_blocks, 1ull) + 1 == gridDim.x;
    __syncthreads();
    if (!*shared_last) return;
    __threadfence();
    for (u32 job = threadIdx.x; job < n_jobs; job += THREADS)
        give_verdict<ELEMENT_BYTES>(jobs[job], scratch->of_job[job], verdicts[job]);
    if (threadIdx.x == 0) scratch->finished_blocks = 0;
}
