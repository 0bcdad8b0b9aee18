// Reading blocks of frames that nobody vouches for (FORMAT.md 8): shared by decode.cu and decode_reduce.cu.
//
// Geometry comes from the job, which the host made from the tensors it was given, never from the frame. What the frame
// says about a block (offset, size, flags) is checked against the buffer before it becomes an address. A block that
// fails a check is a fault in the accumulators; its words are whatever came out, inside the block's own place.
#pragma once
#include "layout.cuh"
#include "planes.cuh"
#include "tile.cuh"

constexpr u32 READ_STAGES = 2;

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

// What is loaded of a block, as its reader needs it; in shared memory, one a stage.
struct BlockPlan {
    u32 size;   // bytes of the dynamic part; 0 if faulty
    u32 shift;  // where they begin behind the record in the stage
    u32 stored, low, faulty;
};

template <u32 ELEMENT_BYTES>
struct ReadShared {
    static constexpr u32 MOST_DYNAMIC = SPILL_BYTES + (ELEMENT_BYTES == 4 ? 2 * BLOCK_WORDS : 0);
    static constexpr u32 STAGE_BYTES = u32(RECORD_BYTES + MOST_DYNAMIC + 32 + 127) / 128 * 128;
    static_assert(STAGE_BYTES >= BLOCK_WORDS * ELEMENT_BYTES, "a stage also holds a tile that was not encoded");
    u8 stage[READ_STAGES][STAGE_BYTES];
    u8 elements[BLOCK_WORDS * ELEMENT_BYTES];
    BlockPlan plan[READ_STAGES];
    u64 barriers[READ_STAGES];
    u64 warp_sums[WARPS];
    u32 warp_escapes[WARPS];
    u32 stored_escapes, last;
};

// Two directory entries, asked for one tile before they are needed.
struct Entries {
    u64 own, next;
};

__device__ __forceinline__ Entries read_entries(const FrameJob& job, u64 block) {
    const volatile u64* header = (const volatile u64*)job.frame;
    const volatile u64* directory = header + HEADER_BYTES / 8;
    return {directory[block], block + 1 < job.tiles ? directory[block + 1] : header[2]};
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ BlockPlan plan_block(const FrameJob& job, u64 block, Entries entries) {
    const u64 fixed = static_bytes(job.n), room = job.capacity_bytes - fixed;  // the host checked capacity >= fixed
    const u32 m = block_words(job.n, block);
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

// Start loading the record and the dynamic part of a block: whole 16-byte pieces, but no byte beyond the buffer.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void load_block(const FrameJob& job, u64 block, Entries entries, u8* stage,
                                           BlockPlan& shared_plan, StageLoads loads, bool elected) {
    if (ZIPCCL_BULK && !elected) return;
    const BlockPlan plan = plan_block<ELEMENT_BYTES>(job, block, entries);
    const u32 record = u32(align128(record_bytes(block_words(job.n, block))));
    u32 whole = 0, rest = 0;
    u64 from = job.frame + static_bytes(job.n) + (entries.own & OFFSET_MASK) - plan.shift;
    if (plan.size) {
        whole = (plan.shift + plan.size + 15) & ~15u;
        u64 buffer_end = job.frame + job.capacity_bytes;
        if (from + whole > buffer_end) whole = u32(buffer_end - from) & ~15u, rest = plan.shift + plan.size - whole;
    }
    loads.expect(record + whole, elected);
    loads.load(stage, (const void*)(job.frame + records_begin(job.n) + block * RECORD_BYTES), record, elected);
    loads.load(stage + RECORD_BYTES, (const void*)from, whole, elected);
    if (elected) {
        shared_plan = plan;
        for (u32 i = 0; i < rest; ++i) stage[RECORD_BYTES + whole + i] = ((const u8*)from)[whole + i];
    }
}

__device__ __forceinline__ u32 load_shared_unaligned(const u8* p) {
    u64 address = (u64)p;
    const u32* words = (const u32*)(address & ~3ull);
    u32 shift = u32(address & 3) * 8;
    return shift ? __funnelshift_r(words[0], words[1], shift) : words[0];
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ u32 chunk_offset(u32 slot) {
    return threadIdx.x * (THREAD_WORDS * ELEMENT_BYTES) + ((slot + slot_rotation()) & 3) * (8 * ELEMENT_BYTES);
}

// This thread's 32 elements of a tile in shared memory, in slot order; their part of the block's digest sum.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ u64 digest_of_elements(const u8* elements, const Weights<ELEMENT_BYTES>& weights) {
    u64 sum = 0;
#pragma unroll
    for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
        for (u32 i = 0; i < Weights<ELEMENT_BYTES>::CHUNK / 4; ++i) {
            uint4 x = *(const uint4*)(elements + chunk_offset<ELEMENT_BYTES>(slot) + i * 16);
            const u32* w = &weights.w[slot * Weights<ELEMENT_BYTES>::CHUNK + i * 4];
            sum += u64(x.x) * w[0];
            sum += u64(x.y) * w[1];
            sum += u64(x.z) * w[2];
            sum += u64(x.w) * w[3];
        }
    return sum;
}

// Rebuild one block of a stage into shared.elements, and check it (FORMAT.md 8.10, 8.11).
//
// On return each thread may read the 32 elements that are its own; a barrier makes all of them readable, the stage free,
// and shared.warp_sums and the number of escapes (returned, the same in all threads) final. `low_seen` is not zero in
// some thread if the block's low halves are not all zero.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ u32 rebuild_block(ReadShared<ELEMENT_BYTES>& shared, u32 stage_index, u64 block, u32 m,
                                             const Codes& codes, const Weights<ELEMENT_BYTES>& weights,
                                             ReadAccumulators& of_job, bool elected, u32& low_seen) {
    const u32 t = threadIdx.x, lane = t & 31, warp = t >> 5, rotation = slot_rotation();
    u8* stage = shared.stage[stage_index];
    u8* elements = shared.elements;
    const BlockPlan plan = shared.plan[stage_index];
    const u8* dynamic = stage + RECORD_BYTES + plan.shift;
    const u32 record = record_bytes(m), spill = spill_bytes(m), low_bytes = plan.low ? 2 * m : 0;
    low_seen = 0;
    if (plan.faulty && t == 0) report_fault(of_job, FAULT_DIRECTORY, block, 0);

    if (m < BLOCK_WORDS) {  // once a frame: padding, and planes moved to where those of a full block are
        const u32 held = plan.stored ? (2 * m < record ? 2 * m : record) : record;
        for (u32 i = held + t; i < u32(align128(record)); i += THREADS)
            if (stage[i]) report_fault(of_job, FAULT_RECORD, block, i);
        if (!plan.stored) {
            const u32 plane_bytes = (m + 7) / 8;
            wait_stores_read(elected);
            __syncthreads();
            for (u32 i = t; i < RECORD_BYTES; i += THREADS) {
                u32 within = i < BLOCK_WORDS ? i : (i - BLOCK_WORDS) % PLANE_BYTES;
                u32 p = i < BLOCK_WORDS ? 0 : (i - BLOCK_WORDS) / PLANE_BYTES;
                u8 x = 0;
                if (i < BLOCK_WORDS)
                    x = within < m ? stage[within] : 0;
                else
                    x = within < plane_bytes ? stage[m + p * plane_bytes + within] : 0;
                elements[i] = x;
            }
            __syncthreads();
            for (u32 i = t * 4; i < RECORD_BYTES; i += THREADS * 4) *(u32*)(stage + i) = *(const u32*)(elements + i);
            __syncthreads();
        }
    }

    const u32 valid = valid_words(m);
    u64 sum = 0;
    u32 total = 0;
    if (!plan.stored) {
        const u32* planes = (const u32*)(stage + BLOCK_WORDS);
        const u32 p0 = planes[t], p1 = planes[PLANE_BYTES / 4 + t], p2 = planes[2 * PLANE_BYTES / 4 + t];
        if ((p0 | p1 | p2) & ~valid) report_fault(of_job, FAULT_RECORD, block, t);
        u32 escaped = ~(p0 | p1 | p2) & valid;
        const u32 count = __popc(escaped);
        const u32 inclusive = warp_inclusive_sum(count);
        if (lane == 31) shared.warp_escapes[warp] = inclusive;

        u32 sign_mantissa[8], v[16];
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot) {
            uint2 x = *(const uint2*)(stage + t * 32 + ((slot + rotation) & 3) * 8);
            sign_mantissa[slot * 2] = x.x, sign_mantissa[slot * 2 + 1] = x.y;
        }
        join_words(__funnelshift_r(p0, p0, 8 * rotation), __funnelshift_r(p1, p1, 8 * rotation),
                   __funnelshift_r(p2, p2, 8 * rotation), codes, sign_mantissa, v);
        if (ELEMENT_BYTES == 2) {
#pragma unroll
            for (u32 i = 0; i < 16; ++i) sum += u64(v[i]) * weights.w[i];
        }

        wait_stores_read(elected);
        __syncthreads();
        u32 position = inclusive - count;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) {
            if (w == warp) position += total;
            total += shared.warp_escapes[w];
        }
        const bool sized = plan.size == total + low_bytes;
        if (!sized && t == 0 && !plan.faulty) report_fault(of_job, total > spill ? FAULT_CANONICAL : FAULT_RECORD, block, total);

#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot) {
            uint4* to = (uint4*)(elements + chunk_offset<ELEMENT_BYTES>(slot));
            if (ELEMENT_BYTES == 2) {
                to[0] = make_uint4(v[slot * 4], v[slot * 4 + 1], v[slot * 4 + 2], v[slot * 4 + 3]);
            } else {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    u32 a = v[slot * 4 + half * 2], b = v[slot * 4 + half * 2 + 1];
                    uint4 x = make_uint4(a << 16, a & 0xffff0000u, b << 16, b & 0xffff0000u);
                    const u32* w = &weights.w[(slot * 8 + half * 4) % (4 * Weights<ELEMENT_BYTES>::CHUNK)];
                    sum += u64(x.x) * w[0];
                    sum += u64(x.y) * w[1];
                    sum += u64(x.z) * w[2];
                    sum += u64(x.w) * w[3];
                    to[half] = x;
                }
            }
        }
        if (sized) {
            const u32 first = t * THREAD_WORDS;
            while (escaped) {
                const u32 i = first + __ffs(escaped) - 1;
                escaped &= escaped - 1;
                const u32 exponent = dynamic[position++];
                if (codes.holds(exponent)) report_fault(of_job, FAULT_CANONICAL, block, exponent);
                if (ELEMENT_BYTES == 2) {
                    ((u16*)elements)[i] |= u16(exponent << 7);
                    sum += u64(exponent << (7 + 16 * (i & 1))) * digest_weight(i >> 1);
                } else {
                    ((u32*)elements)[i] |= exponent << 23;
                    sum += u64(exponent << 23) * digest_weight(i);
                }
            }
        }
        if (ELEMENT_BYTES == 4 && plan.low && sized) {
            const u32 first = t * THREAD_WORDS;
            for (u32 k = 0; k < THREAD_WORDS && first + k < m; ++k) {
                const u32 i = first + ((k + lane) & 31);  // each lane elsewhere, or all would meet in one bank
                if (i >= m) continue;
                const u8* at = dynamic + total + 2 * i;
                const u32 half = at[0] | at[1] << 8;
                low_seen |= half;
                ((u32*)elements)[i] |= half;
                sum += u64(half) * digest_weight(i);
            }
        }
    } else {
        const bool sized = plan.size == spill + low_bytes;
        if (!sized && t == 0) report_fault(of_job, FAULT_RECORD, block, plan.size);
        wait_stores_read(elected);
        if (t == 0) shared.stored_escapes = 0;
        __syncthreads();
        if (m == BLOCK_WORDS) {
            for (u32 i = t; i < BLOCK_WORDS / 2; i += THREADS) {
                u32 x = i < RECORD_BYTES / 4 ? ((const u32*)stage)[i]
                        : sized              ? load_shared_unaligned(dynamic + i * 4 - RECORD_BYTES)
                                             : 0;
                if (ELEMENT_BYTES == 2) {
                    ((u32*)elements)[i] = x;
                } else {
                    ((u32*)elements)[2 * i] = x << 16;
                    ((u32*)elements)[2 * i + 1] = x & 0xffff0000u;
                }
            }
        } else {
            const u32 held = 2 * m < record ? 2 * m : record;
            for (u32 i = t; i < BLOCK_WORDS; i += THREADS) {
                u32 x = 0;
                if (i < m) {
                    u32 a = 2 * i, b = 2 * i + 1;
                    x = a < held ? stage[a] : sized ? dynamic[a - held] : 0;
                    x |= (b < held ? stage[b] : sized ? dynamic[b - held] : 0) << 8;
                }
                if (ELEMENT_BYTES == 2)
                    ((u16*)elements)[i] = u16(x);
                else
                    ((u32*)elements)[i] = x << 16;
            }
        }
        __syncthreads();
        u32 count = 0;
        const u32 first = t * THREAD_WORDS;
        for (u32 k = 0; k < THREAD_WORDS; ++k) {
            const u32 i = first + ((k + lane) & 31);
            if (i >= m) continue;
            const u32 word = ELEMENT_BYTES == 2 ? ((const u16*)elements)[i] : ((const u32*)elements)[i] >> 16;
            count += !codes.holds(word >> 7 & 0xff);
            if (ELEMENT_BYTES == 4 && plan.low && sized) {
                const u8* at = dynamic + spill + 2 * i;
                const u32 half = at[0] | at[1] << 8;
                low_seen |= half;
                ((u32*)elements)[i] |= half;
            }
        }
        sum = digest_of_elements<ELEMENT_BYTES>(elements, weights);
        count = __reduce_add_sync(~0u, count);
        if (lane == 0) atomicAdd(&shared.stored_escapes, count);
        __syncthreads();
        total = shared.stored_escapes;
        if (total <= spill && t == 0) report_fault(of_job, FAULT_CANONICAL, block, total);
    }
    sum = warp_sum_all(sum);
    if (lane == 0) shared.warp_sums[warp] = sum;
    return total;
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

__device__ __forceinline__ u64 codebook_of_frame(const FrameJob& job) {
    return ((const volatile u64*)job.frame)[8] & ((1ull << 56) - 1);
}
