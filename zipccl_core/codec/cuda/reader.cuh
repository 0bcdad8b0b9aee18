// Reading blocks of frames that nobody vouches for (FORMAT.md 8): shared by decode.cu and decode_reduce.cu.
//
// Geometry comes from the job, which the host made from the tensors it was given, never from the frame. What the frame
// says about a block (offset, size, flags) is checked against the buffer before it becomes an address. A block that
// fails a check is a fault in the accumulators; its words are whatever came out, inside the block's own place.
#pragma once
#include "layout.cuh"
#include "pipeline.cuh"
#include "planes.cuh"

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
__device__ __forceinline__ void report_fault(ReadScratch* scratch, u32 job, u32 step, u64 block, u32 detail) {
    atomicMax(&scratch->of_job[job].fault, u64(63 - step) << 58 | (((1ull << 42) - 1) - block) << 16 | (detail & 0xffff));
}

// What is loaded of a block, as its readers need it, in one word of shared memory a stage.
struct BlockPlan {
    u32 packed;

    __device__ __forceinline__ u32 size() const { return packed & 0xffff; }  // bytes of the dynamic part; 0 if faulty
    __device__ __forceinline__ u32 shift() const { return packed >> 16 & 15; }  // where they begin behind the record
    __device__ __forceinline__ bool stored() const { return packed >> 20 & 1; }
    __device__ __forceinline__ bool low() const { return packed >> 21 & 1; }
    __device__ __forceinline__ bool faulty() const { return packed >> 22 & 1; }
    __device__ __forceinline__ bool plain() const { return packed >> 23 & 1; }  // no block of a frame: words as they are
};
constexpr u32 PLAN_PLAIN = 1u << 23;
static_assert(SPILL_BYTES + 2 * BLOCK_WORDS < 1 << 16, "16 bits hold a dynamic part");

// Where to load the blocks of a frame from.
struct LoadSource {
    u64 frame;           // address
    u64 fixed_bytes;     // static_bytes of what is expected
    u64 records;         // records_begin of it
    u64 capacity_bytes;  // of the buffer, at least fixed_bytes: the host saw to it
    u32 tiles;
};

// Two directory entries; of the last block, the second is Frame_Bytes.
struct Entries {
    u64 own, next;
};

template <u32 ELEMENT_BYTES, u32 STAGES, u32 OUTPUTS>
struct ReadShared {
    static constexpr u32 MOST_DYNAMIC = SPILL_BYTES + (ELEMENT_BYTES == 4 ? 2 * BLOCK_WORDS : 0) + 32;
    static constexpr u32 STAGE_BYTES = u32(RECORD_BYTES + MOST_DYNAMIC + 127) / 128 * 128;
    static_assert(STAGE_BYTES >= BLOCK_WORDS * ELEMENT_BYTES, "a stage also holds plain words");
    u8 stage[STAGES][STAGE_BYTES];
    u8 elements[OUTPUTS][BLOCK_WORDS * ELEMENT_BYTES];
    Stages<STAGES, ELEMENT_BYTES == 2> stages;
    u64 counted[STAGES];  // mbarriers: all warps have said how many escapes they have
    BlockPlan plan[STAGES];
    u32 lows[STAGES][WARPS];
    u32 last;

    // All threads; ends with a block barrier.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            stages.init();
            for (u32 s = 0; s < STAGES; ++s) init_barrier(&counted[s], WARPS);
            publish_barriers();
        }
        __syncthreads();
    }
};

__device__ __forceinline__ u64 frame_bytes_of(u64 frame) { return ((const volatile u64*)frame)[2]; }
__device__ __forceinline__ u64 codebook_of_frame(u64 frame) {
    return ((const volatile u64*)frame)[8] & ((1ull << 56) - 1);
}

// Asked for one block ahead: they are far away.
__device__ __forceinline__ Entries read_entries(const LoadSource& source, u32 block) {
    const volatile u64* entries = (const volatile u64*)(source.frame + HEADER_BYTES) + block;
    return {entries[0], block + 1 < source.tiles ? entries[1] : frame_bytes_of(source.frame)};
}
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ BlockPlan plan_block(const LoadSource& source, u32 block, u32 m, Entries entries) {
    const u64 room = source.capacity_bytes - source.fixed_bytes;
    const u64 offset = entries.own & OFFSET_MASK;
    const u64 end = block + 1 < source.tiles ? entries.next & OFFSET_MASK : entries.next - source.fixed_bytes;
    const u32 flags = u32(entries.own >> 56);  // stored, low halves, six bits that must be zero
    const u64 size = end - offset;
    const bool faulty = (flags & ~(ELEMENT_BYTES == 4 ? 3u : 1u)) || (block == 0 && offset) || end < offset ||
                        end > room || size > spill_bytes(m) + (ELEMENT_BYTES == 4 ? 2 * m : 0);
    return {faulty ? 1u << 22 : u32(size) | (u32(offset) & 15) << 16 | flags << 20};
}

// Load the record and the dynamic part of a block: whole 16-byte pieces, but no byte beyond the buffer. By one warp.
template <u32 ELEMENT_BYTES, class Shared>
__device__ __forceinline__ BlockPlan load_block(Shared& shared, u32 s, const LoadSource& source, u32 block, u32 m,
                                                Entries entries) {
    const BlockPlan plan = plan_block<ELEMENT_BYTES>(source, block, m, entries);
    const u32 record = m == BLOCK_WORDS ? RECORD_BYTES : u32(align128(record_bytes(m)));
    u8* stage = shared.stage[s];
    const u64 from = source.frame + source.fixed_bytes + (entries.own & OFFSET_MASK) - plan.shift();
    u32 whole = (plan.size() + plan.shift() + 15) & ~15u;
    const u64 buffer_end = source.frame + source.capacity_bytes;
    if (plan.size() == 0) {
        whole = 0;
    } else if (from + whole > buffer_end) {  // the last bytes of a buffer that ends with the frame, one by one
        whole = u32(buffer_end - from) & ~15u;
        if (lane_of() == 0)
            for (u32 i = whole; i < plan.shift() + plan.size(); ++i) stage[RECORD_BYTES + i] = *(const u8*)(from + i);
    }
    __syncwarp();  // all lanes have read the plan before
    if (lane_of() == 0) shared.plan[s] = plan;
    u64* loaded = &shared.stages.loaded[s];
    begin_load(loaded, record + whole);
    load_piece(loaded, stage, source.frame + source.records + u64(block) * RECORD_BYTES, record);
    load_piece(loaded, stage + RECORD_BYTES, from, whole);
    end_load(loaded);
    return plan;
}

__device__ __forceinline__ u32 load_shared_unaligned(const u8* p) {
    u64 address = (u64)p;
    const u32* words = (const u32*)(address & ~3ull);
    u32 shift = u32(address & 3) * 8;
    return shift ? __funnelshift_r(words[0], words[1], shift) : words[0];
}

// A warp's part of the record of a short block, laid out as that of a full one: signs and mantissas, then three planes.
__device__ __forceinline__ void expand_short(const u8* record, u32 m, u8* to) {
    const u32 first = warp_of() * WARP_WORDS, plane_bytes = (m + 7) / 8;
#pragma unroll 1
    for (u32 i = lane_of(); i < WARP_WORDS; i += 32) to[i] = first + i < m ? record[first + i] : 0;
#pragma unroll 1
    for (u32 i = lane_of(); i < 3 * WARP_WORDS / 8; i += 32) {
        const u32 p = i / (WARP_WORDS / 8), at = first / 8 + i % (WARP_WORDS / 8);
        to[WARP_WORDS + i] = at < plane_bytes ? record[m + p * plane_bytes + at] : 0;
    }
    __syncwarp();
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

// If there is a bit: the byte in front of `from` in shared memory, which goes back by one; else 0.
__device__ __forceinline__ u32 byte_if(u32 bit, u32& from) {
    u32 byte;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %1, 0;\n@p add.u32 %0, %0, -1;\n"
                 "@p ld.shared.u8 %1, [%0];\n}"
                 : "+r"(from), "=&r"(byte)
                 : "r"(bit));
    return byte;
}

// The exponents of a thread's escapes, a bit each in `escaped`, from shared memory in front of `end`, into its words,
// where they are zero. It passes over all words, a chunk from its last one to its first; two chunks at a time, each from
// where its own exponents end, so that it waits for memory twice.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void take_escapes(u8* words, u32 rotation, u32 escaped, u32 end) {
    u32 begin = rotation * 8;  // a word of the chunk to begin with; the one before it is next
    asm volatile("" : "+r"(begin));  // or addresses wait in registers since the words were written
    const u32 turned = __funnelshift_l(escaped, escaped, 24 - begin);
#pragma unroll
    for (u32 pair = 0; pair < 4; pair += 2) {
        u32 exponent[2][8];
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            const u32 slot = pair + odd, word = (begin - slot * 8) & 24;
            u32 from = end - __popc(escaped >> word >> 8);
#pragma unroll
            for (u32 i = 8; i--;) exponent[odd][i] = byte_if(turned & 1u << (24 - slot * 8 + i), from);
        }
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            const u32 word = (begin - (pair + odd) * 8) & 24;
            uint4* chunk = (uint4*)(words + word * ELEMENT_BYTES);
            const uint4 a = chunk[0], b = chunk[ELEMENT_BYTES / 2 - 1];
            u32 x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                if (ELEMENT_BYTES == 4)
                    x[i] += exponent[odd][i] << 23;
                else
                    x[i / 2] += exponent[odd][i] << (7 + 16 * (i % 2));
            chunk[0] = make_uint4(x[0], x[1], x[2], x[3]);
            if (ELEMENT_BYTES == 4) chunk[1] = make_uint4(x[4], x[5], x[6], x[7]);
        }
    }
}

// Rebuild a warp's eighth of a block from a stage into `elements`, and check it (FORMAT.md 8.10, 8.11). All lanes. Stores
// from `elements`, but for the last PENDING committed, are waited for first.
//
// A warp waits for the others only to learn how many escapes precede its own: it says its number early, and asks for
// theirs late. After it any lane may read any of the warp's elements. EXPECTS_MANY escapes: takes more registers.
template <u32 ELEMENT_BYTES, u32 PENDING, bool EXPECTS_MANY, class Shared, bool PINNED>
__device__ __forceinline__ void rebuild_words(Shared& shared, const Place<PINNED>& place, u8* elements, u32 s,
                                              u32 block, u32 m, const Codes& codes, u32 counted_parity,
                                              ReadScratch* scratch, u32 job) {
    const u32 t = place.thread, lane = place.lane(), warp = place.warp(), rotation = place.rotation;
    const u8* stage = shared.stage[s];
    const BlockPlan plan = shared.plan[s];
    const u8* dynamic = stage + RECORD_BYTES + plan.shift();
    const u32 low_bytes = plan.low() ? 2 * m : 0;
    u32 low_seen = 0;

    if (m < BLOCK_WORDS && warp == 0) {  // once a frame
        const u32 record = record_bytes(m), held = plan.stored() && 2 * m < record ? 2 * m : record;
#pragma unroll 1
        for (u32 i = held + lane; i < u32(align128(record)); i += 32)
            if (stage[i]) report_fault(scratch, job, FAULT_RECORD, block, i);
    }
    if (!plan.stored()) {
        // where this warp's planes are, and how far one from the next
        const u8* signs = stage;
        const u32* planes = (const u32*)(stage + BLOCK_WORDS) + warp * 32;
        u32 stride = PLANE_BYTES / 4, valid = ~0u;
        if (m < BLOCK_WORDS) {
            wait_stores_read<PENDING>();
            u8* own = elements + warp * (WARP_WORDS * ELEMENT_BYTES);
            expand_short(stage, m, own);
            signs = own - warp * WARP_WORDS;
            planes = (const u32*)(own + WARP_WORDS);
            stride = 32;
            valid = valid_words(t, m);
        }
        const u32 p0 = planes[lane], p1 = planes[stride + lane], p2 = planes[2 * stride + lane];
        uint2 sign_mantissa[4];
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
            sign_mantissa[slot] = *(const uint2*)(signs + place.chunk[slot]);
        if ((p0 | p1 | p2) & ~valid) report_fault(scratch, job, FAULT_RECORD, block, t);
        u32 escaped = ~(p0 | p1 | p2) & valid;
        const u32 count = __popc(escaped);
        const u32 inclusive = warp_inclusive_sum(count);
        const u32 of_warp = __shfl_sync(~0u, inclusive, 31);
        if (lane == 0) {
            shared.stages.counts[s][warp] = of_warp;
            arrive(&shared.counted[s]);
        }
        u32 z[4];
        code_nibbles(__funnelshift_r(p0, p0, 8 * rotation), __funnelshift_r(p1, p1, 8 * rotation),
                     __funnelshift_r(p2, p2, 8 * rotation), z);
        wait_stores_read<PENDING>();
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const uint2 a = sign_mantissa[half * 2], b = sign_mantissa[half * 2 + 1];
            const u32 four[4] = {a.x, a.y, b.x, b.y};
            u32 v[8];
            join_words(z, half, codes, four, v);
#pragma unroll
            for (u32 odd = 0; odd < 2; ++odd) {
                uint4* to = (uint4*)(elements + place.chunk[half * 2 + odd] * ELEMENT_BYTES);
                if (ELEMENT_BYTES == 2) {
                    to[0] = make_uint4(v[odd * 4], v[odd * 4 + 1], v[odd * 4 + 2], v[odd * 4 + 3]);
                } else {
#pragma unroll
                    for (u32 q = 0; q < 2; ++q) {
                        const u32 c = v[odd * 4 + q * 2], d = v[odd * 4 + q * 2 + 1];
                        to[q] = make_uint4(c << 16, c & 0xffff0000u, d << 16, d & 0xffff0000u);
                    }
                }
            }
        }

        wait_barrier(&shared.counted[s], counted_parity);
        const u32 theirs = lane < WARPS ? shared.stages.counts[s][lane] : 0;
        const u32 before = __reduce_add_sync(~0u, lane < warp ? theirs : 0);
        const u32 total = __reduce_add_sync(~0u, theirs);
        if (plan.size() == total + low_bytes) {
            const u8* from = dynamic + before;
            u32* mine = (u32*)(elements + t * (THREAD_WORDS * ELEMENT_BYTES));
            if (!EXPECTS_MANY || of_warp <= FEW_ESCAPES) {
                for (u32 i = lane; i < of_warp; i += 32)
                    if (codes.holds(from[i])) report_fault(scratch, job, FAULT_CANONICAL, block, from[i]);
                from += inclusive;
                while (escaped) {  // from the last to the first; their exponents are still zero
                    const u32 i = 31 - __clz(escaped);
                    escaped ^= 1u << i;
                    const u32 exponent = *--from;
                    if (ELEMENT_BYTES == 2)
                        atomicOr(mine + (i >> 1), exponent << (7 + 16 * (i & 1)));
                    else
                        atomicOr(mine + i, exponent << 23);
                }
            } else {
                const u32 skip = shared_address(from) & 3;
                const u32* fours = (const u32*)(from - skip);  // a word beyond the escapes is still of the stage
#pragma unroll 1
                for (u32 i = lane * 4; i < of_warp; i += 128) {
                    const u32 left = of_warp - i, of_left = left < 4 ? (1u << (8 * left)) - 1 : ~0u;
                    if (codes.held_of(__funnelshift_r(fours[i / 4], fours[i / 4 + 1], 8 * skip)) & of_left)
#pragma unroll 1
                        for (u32 k = i; k < i + 4 && k < of_warp; ++k)
                            if (codes.holds(from[k])) report_fault(scratch, job, FAULT_CANONICAL, block, from[k]);
                }
                take_escapes<ELEMENT_BYTES>((u8*)mine, rotation, escaped, shared_address(from + inclusive));
            }
            if (ELEMENT_BYTES == 4 && low_bytes) {
                __syncwarp();
                low_seen = add_low_halves(elements, dynamic + total, m);
            }
        } else if (t == 0) {
            report_fault(scratch, job, FAULT_RECORD, block, total);
        }
    } else {
        const u32 record = record_bytes(m), spill = spill_bytes(m), held = 2 * m < record ? 2 * m : record;
        if (lane == 0) arrive(&shared.counted[s]);  // nobody waits; the phase must end all the same
        const bool sized = plan.size() == spill + low_bytes;
        if (!sized && t == 0) report_fault(scratch, job, FAULT_RECORD, block, plan.size());
        wait_stores_read<PENDING>();
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
        if (lane == 0) shared.stages.counts[s][warp] = escapes;
        __syncwarp();
        if (ELEMENT_BYTES == 4 && low_bytes && sized) low_seen = add_low_halves(elements, dynamic + spill, m);
    }
    if (ELEMENT_BYTES == 4) {
        low_seen = __any_sync(~0u, low_seen != 0);
        if (lane == 0) shared.lows[s][warp] = low_seen;
    }
    __syncwarp();
}

// What the warps found out about a block, in parts; read before the next block is loaded over it.
struct BlockParts {
    u64 sum;  // of this lane
    u32 escapes, low;  // of this lane
};
template <u32 ELEMENT_BYTES, class Shared>
__device__ __forceinline__ BlockParts parts_of_block(const Shared& shared, u32 s) {
    const u32 lane = lane_of();
    return {shared.stages.part_of_sum(s), lane < WARPS ? shared.stages.counts[s][lane] : 0,
            ELEMENT_BYTES == 4 && lane < WARPS ? shared.lows[s][lane] : 0};
}

// What the loading warp makes of it: the block's digest sum, mixed, and its escapes.
struct BlockResult {
    u64 mixed;
    u32 escapes;
};
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ BlockResult finish_block(BlockParts parts, BlockPlan plan, u32 block, u32 m,
                                                    ReadScratch* scratch, u32 job) {
    const u32 lane = lane_of();
    const u64 sum = warp_sum_all(parts.sum);
    const u32 escapes = __reduce_add_sync(~0u, parts.escapes);
    const u32 low = ELEMENT_BYTES == 4 ? __reduce_or_sync(~0u, parts.low) : 0;
    if (lane == 0) {
        if (plan.faulty()) report_fault(scratch, job, FAULT_DIRECTORY, block, 0);
        if (plan.stored() != (escapes > spill_bytes(m))) report_fault(scratch, job, FAULT_CANONICAL, block, escapes);
        if (ELEMENT_BYTES == 4 && plan.low() && !low) report_fault(scratch, job, FAULT_CANONICAL, block, 0);
    }
    return {mixed_block_sum(sum, block), escapes};
}

// Sums over blocks of one job, into its accumulators.
__device__ __forceinline__ void add_to_job(ReadScratch* scratch, u32 job, u64 digest, u64 escapes) {
    atomicAdd(&scratch->of_job[job].digest, digest);
    atomicAdd(&scratch->of_job[job].escapes, escapes);
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

// The verdict on one frame, by one thread of the last thread block; puts the accumulators back to zero. Of frames of which
// no block was read, only the header.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void give_verdict(const FrameJob& job, ReadAccumulators& of_job, bool was_read,
                                             Verdict& verdict) {
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
        if (!step && was_read && escapes != h[4]) step = FAULT_CANONICAL, detail = 0xffff;
        if (!step && was_read && digest != h[3]) step = FAULT_DIGEST;
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
                                               Verdict* verdicts, u32* shared_last, bool was_read = true) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *shared_last = atomicAdd(&scratch->finished_blocks, 1ull) + 1 == gridDim.x;
    __syncthreads();
    if (!*shared_last) return;
    __threadfence();
    for (u32 job = threadIdx.x; job < n_jobs; job += BLOCK_THREADS)
        give_verdict<ELEMENT_BYTES>(jobs[job], scratch->of_job[job], was_read, verdicts[job]);
    if (threadIdx.x == 0) scratch->finished_blocks = 0;
}
