// Encoding (FORMAT.md 2-6): encode_*_kernel writes all records, pack_*_kernel puts the dynamic parts in their places.
//
// encode: a persistent grid; a thread block takes every gridDim.x-th tile, and its warps an eighth each, without waiting
// for each other. A warp leaves its part of the record in the frame, and its escapes in a slot of the scratch; the warp
// that loads leaves their numbers. pack, launched behind it, sums the sizes before each tile, moves the few per cent
// that are dynamic, makes stored what must be, and writes directories and headers. No tile waits for another, and what
// is added up is integers: no order can show.
#include "layout.cuh"
#include "pipeline.cuh"
#include "planes.cuh"

constexpr u32 ENCODE_STAGES = ZIPCCL_ENCODE_STAGES;
constexpr u32 PACK_THREADS = 512;
constexpr u32 SLOT_BYTES = ZIPCCL_SLOT_BYTES / WARPS;  // of a warp's escapes: all its words may be
constexpr u32 COUNT_FIELD = 0x7fff;
constexpr u32 LOW_FLAG = 0x8000;  // in the first count of a tile
constexpr u32 PART_BYTES = 1024;  // of a tile's halves: four rows of a warp's words of 8 bytes
constexpr u32 PARTS = 2 * BLOCK_WORDS / PART_BYTES;
static_assert(SLOT_BYTES == WARP_WORDS, "a slot holds the escapes of a warp");

// Escapes of the eight warps of a tile.
struct alignas(16) TileCounts {
    u16 of_warp[WARPS];
};

template <u32 ELEMENT_BYTES>
struct EncodeShared {
    u8 tile[ENCODE_STAGES][BLOCK_WORDS * ELEMENT_BYTES];
    u8 sign_mantissa[WARPS][WARP_WORDS];
    u8 escapes[WARPS][WARP_WORDS];
    u32 unlike[WARPS][56];
    Stages<ENCODE_STAGES, true> stages;
};

// Of one frame, in scratch; zero before and after every launch.
struct FrameSums {
    u64 digest, escapes, dynamic_bytes, reserved;
};

__device__ __forceinline__ u64 codebook_of(const FrameJob& job) {
    u64 exponents = job.codebook_address ? *(const volatile u64*)job.codebook_address : job.codebook;
    return exponents & ((1ull << 56) - 1);
}

// Tiles of 16-byte aligned elements are loaded ahead; of others, each warp loads its part when its turn comes.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ bool loads_ahead(u64 source, u32 m) {
    return source % 16 == 0 && m * ELEMENT_BYTES % 16 == 0;
}

// A job's tiles and where its elements and records are.
struct EncodeJob : JobTiles {
    u64 words_address, records_address;

    __device__ __forceinline__ EncodeJob() : words_address(0), records_address(0) {}
    __device__ __forceinline__ void seek(const FrameJob* jobs, u32 tile) {
        JobTiles::seek(jobs, tile);
        words_address = jobs[job].words;
        records_address = jobs[job].frame + records_begin(jobs[job].n);
    }
};

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void load_tile(const FrameJob* jobs, EncodeJob& job, u32 tile, u32 tiles, u8* to,
                                          u64* barrier) {
    if (tile >= tiles) return;
    if (!job.holds(tile)) job.seek(jobs, tile);
    const u32 block = tile - job.first_tile, m = job.words(block);
    const u64 source = job.words_address + u64(block) * (BLOCK_WORDS * ELEMENT_BYTES);
    if (!loads_ahead<ELEMENT_BYTES>(source, m)) return;
    begin_load(barrier, m * ELEMENT_BYTES);
    load_piece(barrier, to, source, m * ELEMENT_BYTES);
    end_load(barrier);
}

__device__ __forceinline__ void add_to_frame(const FrameSums& sums, FrameSums& frame) {
    atomicAdd(&frame.digest, sums.digest);
    atomicAdd(&frame.escapes, sums.escapes);
    atomicAdd(&frame.dynamic_bytes, sums.dynamic_bytes);
}

// The loading warp: loads tiles ahead, and adds up what the others found in those they are done with.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void feed_encoders(const JobTable& table, EncodeShared<ELEMENT_BYTES>& shared,
                                              FrameSums* frame_sums, TileCounts* counts, u16* sizes) {
    const u32 lane = lane_of(), tiles = table.tiles;
    const FrameJob* jobs = table.all();
    EncodeJob load_job, job;
    StageCursor<ENCODE_STAGES> cursor;
    FrameSums sums{0, 0, 0, 0};
    u32 load = blockIdx.x;
#pragma unroll 1
    for (u32 s = 0; s < ENCODE_STAGES; ++s, load += gridDim.x)
        load_tile<ELEMENT_BYTES>(jobs, load_job, load, tiles, shared.tile[s], &shared.stages.loaded[s]);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, load += gridDim.x, cursor.advance()) {
        const u32 s = cursor.stage;
        wait_barrier(&shared.stages.empty[s], cursor.parity);
        // what the warps left is read before the next tile is loaded over it
        u64 block_sum = shared.stages.part_of_sum(s);
        const u32 of_warp = shared.stages.counts[s][lane % WARPS];
        load_tile<ELEMENT_BYTES>(jobs, load_job, load, tiles, shared.tile[s], &shared.stages.loaded[s]);

        if (!job.holds(tile)) {
            if (job.job != ~0u && lane == 0) add_to_frame(sums, frame_sums[job.job]);
            sums = {0, 0, 0, 0};
            job.seek(jobs, tile);
        }
        const u32 block = tile - job.first_tile, m = job.words(block), spill = spill_bytes(m);
        block_sum = warp_sum_all(block_sum);
        const bool any_low = ELEMENT_BYTES == 4 && __any_sync(~0u, of_warp & LOW_FLAG);
        const u32 all = __reduce_add_sync(~0u, lane < WARPS ? of_warp & COUNT_FIELD : 0);
        const u32 size = (all > spill ? spill : all) + (any_low ? 2 * m : 0);
        if (lane < WARPS) counts[tile].of_warp[lane] = u16((of_warp & COUNT_FIELD) | (any_low ? LOW_FLAG : 0));
        if (lane == 0) sizes[tile] = u16(size);
        sums.digest += mixed_block_sum(block_sum, block);
        sums.escapes += all;
        sums.dynamic_bytes += size;
    }
    if (job.job != ~0u && lane == 0) add_to_frame(sums, frame_sums[job.job]);
}

// If there is a bit: a byte to shared memory in front of `to`, which goes back by one.
__device__ __forceinline__ void put_byte_if(u32 bit, u32& to, u32 byte) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p add.u32 %0, %0, -1;\n@p st.shared.u8 [%0], %1;\n}"
                 : "+r"(to)  // left to itself the compiler counts by two instructions
                 : "r"(byte), "r"(bit)
                 : "memory");
}

// The escapes of a thread's words, a bit each in `escaped`, to shared memory in front of `end`. It passes over all
// words, from the last of a chunk to its first, then the chunk before it; after the first chunk comes the last.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void put_escapes(const u8* words, u32 rotation, u32 escaped, u32 end) {
    u32 word = rotation * 8;
    asm volatile("" : "+r"(word));  // or addresses wait in registers since the words were read first
    u32 to = end - __popc(escaped >> word >> 8);
    escaped = __funnelshift_l(escaped, escaped, 24 - word);
#pragma unroll
    for (u32 slot = 0; slot < 4; ++slot, word = (word - 8) & 24) {
        const uint4* chunk = (const uint4*)(words + word * ELEMENT_BYTES);
        const uint4 a = chunk[0], b = chunk[ELEMENT_BYTES / 2 - 1];
        const u32 x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (u32 i = 8; i--;)
            put_byte_if(escaped & 1u << (24 - slot * 8 + i), to,
                        ELEMENT_BYTES == 4 ? x[i] >> 23 : x[i / 2] >> (7 + 16 * (i % 2)));
        if (word == 0) to = end;
    }
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void encode_tiles(const JobTable& table, FrameSums* frame_sums, TileCounts* counts,
                                             u16* sizes, u8* slots) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<EncodeShared<ELEMENT_BYTES>*>(shared_bytes);
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;

    const Place<false> place;
    const u32 t = place.thread, lane = place.lane(), warp = place.warp(), rotation = place.rotation;
    if (t == 0) {
        shared.stages.init();
        publish_barriers();
    }
    __syncthreads();
    if (warp == WARPS) return feed_encoders<ELEMENT_BYTES>(table, shared, frame_sums, counts, sizes);

    const FrameJob* jobs = table.all();
    const u32 tiles = table.tiles;
    EncodeJob job;
    StageCursor<ENCODE_STAGES> cursor;
    u32 loads = 0;  // parity of each stage's loads: not every tile is one
    Codes codes(0);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, cursor.advance()) {
        const u32 stage = cursor.stage;
        if (!job.holds(tile)) {
            job.seek(jobs, tile);
            const u64 exponents = codebook_of(jobs[job.job]);
            codes = Codes(exponents);
            __syncwarp();
            for (u32 i = lane; i < 56; i += 32) shared.unlike[warp][i] = (exponents >> i & 1) ? 0 : ~0u;
            __syncwarp();
        }
        const u32 block = tile - job.first_tile, m = job.words(block);
        u8* elements = shared.tile[stage];

        const u64 source = job.words_address + u64(block) * (BLOCK_WORDS * ELEMENT_BYTES);
        const bool ahead = loads_ahead<ELEMENT_BYTES>(source, m);
        if (ahead) {
            wait_barrier(&shared.stages.loaded[stage], loads >> stage & 1);
            loads ^= 1u << stage;
        }
        if (!ahead || m < BLOCK_WORDS) {
            const u32 end = (warp + 1) * WARP_WORDS;
#pragma unroll 1
            for (u32 i = warp * WARP_WORDS + lane; i < end; i += 32) {
                if (i >= m)
                    ((Element*)elements)[i] = 0;
                else if (!ahead)
                    ((Element*)elements)[i] = ((const Element*)source)[i];
            }
        }
        wait_stores_read();

        // This thread's 32 words, two chunks at a time; digest and low halves on the way.
        u32 exponents[8], low = 0;
        u64 sum = 0;
#pragma unroll
        for (u32 pair = 0; pair < 2; ++pair) {
            u32 v[2][4];
#pragma unroll
            for (u32 odd = 0; odd < 2; ++odd) {
                const u32 slot = pair * 2 + odd;
                const u8* chunk = elements + place.chunk[slot] * ELEMENT_BYTES;
                if (ELEMENT_BYTES == 2) {
                    const uint4 x = *(const uint4*)chunk;
                    sum += weighted(x, weights_of<ELEMENT_BYTES>(t, slot, 0));
                    v[odd][0] = x.x, v[odd][1] = x.y, v[odd][2] = x.z, v[odd][3] = x.w;
                } else {
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        const uint4 x = *(const uint4*)(chunk + half * 16);
                        sum += weighted(x, weights_of<ELEMENT_BYTES>(t, slot, half));
                        low |= x.x | x.y | x.z | x.w;
                        v[odd][half * 2] = bytes_of(x.x, x.y, 0x7632);
                        v[odd][half * 2 + 1] = bytes_of(x.z, x.w, 0x7632);
                    }
                }
                *(uint2*)(&shared.sign_mantissa[0][0] + place.chunk[slot]) =
                    make_uint2(sign_mantissa_of(v[odd][0], v[odd][1]), sign_mantissa_of(v[odd][2], v[odd][3]));
            }
            merge_exponents(v[0], v[1], &exponents[pair * 4]);
        }
        u32 plane[8], code[3];
        exponent_planes(exponents, plane);
        if (codes.contiguous)
            code_planes_of_run(plane, (codes.low >> 8) - 1, code);
        else
            code_planes_of_set(plane, shared.unlike[warp], code);
        const u32 valid = valid_words(t, m);
#pragma unroll
        for (u32 p = 0; p < 3; ++p) {
            u32 turned = in_slot_order(code[p]);
            code[p] = __funnelshift_l(turned, turned, 8 * rotation) & valid;
        }
        u32 escaped = ~(code[0] | code[1] | code[2]) & valid;

        const u32 count = __popc(escaped);
        const u32 inclusive = warp_inclusive_sum(count);
        const u32 total = __shfl_sync(~0u, inclusive, 31);
        shared.stages.put_sum(stage, sum);
        if (ELEMENT_BYTES == 4) low = __any_sync(~0u, low & 0xffff) ? LOW_FLAG : 0;
        if (lane == 0) shared.stages.counts[stage][warp] = total | low;
        const u8* mine = elements + t * (THREAD_WORDS * ELEMENT_BYTES);
        u8* to = &shared.escapes[warp][inclusive];
        if (total <= FEW_ESCAPES) {
            while (escaped) {  // from the last to the first
                const u32 i = 31 - __clz(escaped);
                escaped ^= 1u << i;
                *--to = u8(*(const u16*)(mine + i * ELEMENT_BYTES + (ELEMENT_BYTES - 2)) >> 7);
            }
        } else {
            put_escapes<ELEMENT_BYTES>(mine, rotation, escaped, shared_address(to));
        }
        shared.stages.leave(stage);
        publish_to_stores();
        const u64 record = job.records_address + u64(block) * RECORD_BYTES;
        if (m == BLOCK_WORDS) {
            store_piece(record + warp * WARP_WORDS, shared.sign_mantissa[warp], WARP_WORDS);
            u32* planes = (u32*)(record + BLOCK_WORDS) + t;
#pragma unroll
            for (u32 p = 0; p < 3; ++p) planes[p * (PLANE_BYTES / 4)] = code[p];
        } else {  // the planes of a short block lie closer together; byte by byte, once a frame
            const u32 used = record_bytes(m), plane_bytes = (m + 7) / 8;
            u8* bytes = (u8*)record;
#pragma unroll 1
            for (u32 i = warp * WARP_WORDS + lane; i < (warp + 1) * WARP_WORDS && i < m; i += 32)
                bytes[i] = (&shared.sign_mantissa[0][0])[i];
#pragma unroll
            for (u32 p = 0; p < 3; ++p)
#pragma unroll
                for (u32 k = 0; k < 4; ++k)
                    if (t * 4 + k < plane_bytes) bytes[m + p * plane_bytes + t * 4 + k] = u8(code[p] >> (8 * k));
#pragma unroll 1
            for (u32 i = used + t; i < align128(used); i += THREADS) bytes[i] = 0;
        }
        for (u32 i = lane * 16; i < total; i += 512)
            *(uint4*)(slots + u64(tile) * ZIPCCL_SLOT_BYTES + warp * SLOT_BYTES + i) =
                *(const uint4*)(shared.escapes[warp] + i);
        commit_stores();

    }
    wait_stores_read();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_ENCODE_BLOCKS_2)
    encode_bfloat16_kernel(const __grid_constant__ JobTable table, FrameSums* frame_sums, TileCounts* counts,
                           u16* sizes, u8* slots) {
    encode_tiles<2>(table, frame_sums, counts, sizes, slots);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_ENCODE_BLOCKS_4)
    encode_float32_kernel(const __grid_constant__ JobTable table, FrameSums* frame_sums, TileCounts* counts,
                          u16* sizes, u8* slots) {
    encode_tiles<4>(table, frame_sums, counts, sizes, slots);
}
extern "C" __constant__ u32 encode_shared_bytes[2] = {sizeof(EncodeShared<2>), sizeof(EncodeShared<4>)};

// --- pack -------------------------------------------------------------------------------------------------------------

struct PackShared {
    TileCounts counts[PACK_THREADS];
    u64 warp_sums[PACK_THREADS / 32];
    u32 offsets[PACK_THREADS];
    u64 header[16];
    u64 before;  // of the next chunk; here, as the moves want the registers
    u32 begin;
};

__device__ __forceinline__ u32 escapes_of(const TileCounts& counts) {
    u32 sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) sum += counts.of_warp[w] & COUNT_FIELD;
    return sum;
}

__device__ __forceinline__ u64 block_sum_all(u64 x, PackShared& shared) {
    x = warp_sum_all(x);
    __syncthreads();
    if (lane_of() == 0) shared.warp_sums[warp_of()] = x;
    __syncthreads();
    return warp_sum_all(lane_of() < PACK_THREADS / 32 ? shared.warp_sums[lane_of()] : 0);
}

// Sum of sizes[first .. end), by all threads.
__device__ __forceinline__ u64 sum_sizes(const u16* sizes, u32 first, u32 end, PackShared& shared) {
    u64 sum = 0;
    u32 aligned_first = (first + 7) & ~7u, aligned_end = end & ~7u;
    if (aligned_first >= aligned_end) {
        for (u32 i = first + threadIdx.x; i < end; i += PACK_THREADS) sum += sizes[i];
    } else {
        if (threadIdx.x < aligned_first - first) sum += sizes[first + threadIdx.x];
        if (threadIdx.x < end - aligned_end) sum += sizes[aligned_end + threadIdx.x];
        // eight loads in flight: this is latency, and little else
        for (u32 i = aligned_first + threadIdx.x * 8; i < aligned_end; i += PACK_THREADS * 64) {
            uint4 x[8];
#pragma unroll
            for (u32 k = 0; k < 8; ++k) {
                const u32 at = i + k * (PACK_THREADS * 8);
                x[k] = at < aligned_end ? *(const uint4*)(sizes + at) : make_uint4(0, 0, 0, 0);
            }
            u32 part = 0;
#pragma unroll
            for (u32 k = 0; k < 8; ++k)
                part += (x[k].x & 0xffff) + (x[k].x >> 16) + (x[k].y & 0xffff) + (x[k].y >> 16) + (x[k].z & 0xffff) +
                        (x[k].z >> 16) + (x[k].w & 0xffff) + (x[k].w >> 16);
            sum += part;
        }
    }
    return block_sum_all(sum, shared);
}

// A warp copies n_bytes to `to`, at any alignment, 4 bytes a lane; word(s) gives the 4 bytes from byte s on, byte(s) one.
template <class Word, class Byte>
__device__ __forceinline__ void copy_bytes(u8* to, u32 n_bytes, Word word, Byte byte) {
    const u32 lane = lane_of();
    u32 head = u32(-(long long)(u64)to) & 3;
    if (head > n_bytes) head = n_bytes;
    const u32 whole = (n_bytes - head) / 4, tail = head + whole * 4;
    if (lane < head) to[lane] = byte(lane);
    if (lane < n_bytes - tail) to[tail + lane] = byte(tail + lane);
#pragma unroll 1
    for (u32 i = lane; i < whole; i += 32) *(u32*)(to + head + i * 4) = word(head + i * 4);
}

// 4 bytes at any address; reads no aligned word that holds none of them.
__device__ __forceinline__ u32 load_unaligned(const u8* p) {
    u64 address = (u64)p;
    const u32* words = (const u32*)(address & ~3ull);
    u32 shift = u32(address & 3) * 8;
    return shift ? __funnelshift_r(words[0], words[1], shift) : words[0];
}

// Bytes begin .. end of the words of a block of bfloat16.
__device__ __forceinline__ void copy_words(u8* to, const u8* source, u32 begin, u32 end) {
    copy_bytes(
        to, end - begin, [=](u32 s) { return load_unaligned(source + begin + s); },
        [=](u32 s) { return source[begin + s]; });
}

// Bytes begin .. end of the lower (upper = 0) or upper (1) halves of m 32-bit elements to where they belong if byte 0
// belongs at `at`, at any alignment: a warp, by at most PART_BYTES / 8 words of 8 bytes there, all loads before the
// first store. Word k has bytes of fours k - 1 and k of the elements, and only whole fours are loaded.
__device__ __forceinline__ void move_halves(u8* at, const u32* elements, u32 m, u32 upper, u32 begin, u32 end) {
    constexpr u32 ROWS = PART_BYTES / 256;
    const u32 lane = lane_of(), into = u32((u64)at) & 7, shift = into % 4 * 8, selector = upper ? 0x7632 : 0x5410;
    const u32 first = (begin + into + 7) / 8, fours = m / 4, whole = (end + into) / 8;
    const u32 last = whole < fours ? whole : fours;  // words first .. last are all of bytes begin .. end

    // the bytes around them: up to 7 before, up to 13 behind
    const u32 before = first * 8 - into < end ? first * 8 - into : end;
    const u32 behind = first < last ? last * 8 - into : before;
    const u32 byte = lane < 8 ? begin + lane : behind + lane - 8;
    const bool around = byte < (lane < 8 ? before : end);
    const u8 single = around ? ((const u8*)elements)[byte / 2 * 4 + upper * 2 + byte % 2] : 0;

    if (first < last) {
        const u32 left = last - first;
        const u32* four = elements + (first + lane) * 4;
        uint4 x[ROWS], previous = make_uint4(0, 0, 0, 0);  // lane 0's; set in all, or it has registers for good
        if ((u64)elements % 16 == 0) {
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r)
                x[r] = r * 32 + lane < left ? *(const uint4*)(four + r * 128) : make_uint4(0, 0, 0, 0);
            if (lane == 0 && first) previous = *(const uint4*)(four - 4);
        } else {
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r)
                x[r] = r * 32 + lane < left ? make_uint4(four[r * 128], four[r * 128 + 1], four[r * 128 + 2],
                                                         four[r * 128 + 3])
                                            : make_uint4(0, 0, 0, 0);
            if (lane == 0 && first) previous = make_uint4(four[-4], four[-3], four[-2], four[-1]);
        }
        const bool far = into & 4;  // whether a word begins among the first or the last 4 bytes of the four before
        u32 old_high = bytes_of(previous.z, previous.w, selector);
        u32 old_kept = far ? bytes_of(previous.x, previous.y, selector) : old_high;
        uint2* to = (uint2*)(at - into) + first + lane;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u32 low = bytes_of(x[r].x, x[r].y, selector), high = bytes_of(x[r].z, x[r].w, selector);
            const u32 kept = far ? low : high;
            const u32 next_high = __shfl_sync(~0u, high, lane - 1), next_kept = __shfl_sync(~0u, kept, lane - 1);
            const u32 from = lane ? next_kept : old_kept, middle = far ? (lane ? next_high : old_high) : low;
            old_high = next_high, old_kept = next_kept;  // lane 0 has lane 31's
            if (r * 32 + lane < left)
                to[r * 32] = make_uint2(__funnelshift_l(from, middle, shift), __funnelshift_l(middle, kept, shift));
        }
    }
    if (around) at[byte] = single;
}

// A part of the halves of a tile of float32 that are moved: the lower ones to behind its escapes, unless all are zero;
// the upper ones of a stored tile to its record and, what that does not hold, to `to`. Parts meet between whole words.
__device__ __forceinline__ void move_part(const FrameJob& job, u32 block, const TileCounts& counts, u8* to, u32 part) {
    const u32 m = block_words(job.n, block), spill = spill_bytes(m), total = escapes_of(counts);
    const u32* elements = (const u32*)job.words + u64(block) * BLOCK_WORDS;
    const u32 used = record_bytes(m), held = 2 * m < used ? 2 * m : used;
#pragma unroll 1
    for (u32 move = counts.of_warp[0] & LOW_FLAG ? 0 : 1; move < (total > spill ? 3 : 1); ++move) {
        u8* at = to + (total > spill ? spill : total);
        u32 begin = 0, end = 2 * m;
        if (move == 1)
            at = (u8*)job.frame + records_begin(job.n) + u64(block) * RECORD_BYTES, end = held;
        else if (move == 2)
            at = to - held, begin = held;
        const u32 into = u32((u64)at) & 7;
        if (part && begin < part * PART_BYTES - into) begin = part * PART_BYTES - into;
        if (part < PARTS - 1 && end > (part + 1) * PART_BYTES - into) end = (part + 1) * PART_BYTES - into;
        if (begin < end) move_halves(at, elements, m, move > 0, begin, end);
    }
}

// The escapes of a tile, as the eight slots of its warps hold them: a warp's view of them as bytes in a row.
struct Slots {
    const u8* slots;
    u32 shift, through;  // of slot `lane`: from a byte's number to its place, and the number behind its last one

    // The slot that byte i is in: a binary search over the eight sums; all lanes.
    __device__ __forceinline__ u32 slot_of(u32 i) const {
        u32 w = i >= __shfl_sync(~0u, through, 3) ? 4 : 0;
        w += i >= __shfl_sync(~0u, through, w + 1) ? 2 : 0;
        w += i >= __shfl_sync(~0u, through, w) ? 1 : 0;
        return w;
    }
    // Where byte i is, which is in slot w; all lanes.
    __device__ __forceinline__ u32 place_of(u32 i, u32 w) const { return i + __shfl_sync(~0u, shift, w); }

    // To `to`, a byte a lane: 4 loads in flight.
    __device__ __forceinline__ void move_bytes(u8* to, u32 total) const {
        const u32 lane = lane_of();
#pragma unroll 1
        for (u32 first = 0; first < total; first += 128) {
            u8 x[4];
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
                const u32 i = first + k * 32 + lane, at = place_of(i, slot_of(i));
                x[k] = i < total ? slots[at] : 0;
            }
#pragma unroll
            for (u32 k = 0; k < 4; ++k)
                if (first + k * 32 + lane < total) to[first + k * 32 + lane] = x[k];
        }
    }

    // The same by words of 8 bytes of `to`; then the bytes of those that are not of one slot.
    __device__ __forceinline__ void move_words(u8* to, u32 total) const {
        constexpr u32 ROWS = 4;
        const u32 lane = lane_of(), into = u32((u64)to) & 7;  // byte i is byte i + into of a row of whole words
#pragma unroll 1
        for (u32 first = 8 - into; first < total; first += ROWS * 256) {
            u64 x[ROWS], next[ROWS];
            u32 at[ROWS];
            bool whole[ROWS];
#pragma unroll
            for (u32 k = 0; k < ROWS; ++k) {  // all loads before the first store
                const u32 i = first + k * 256 + lane * 8, w = slot_of(i);
                at[k] = place_of(i, w);
                whole[k] = i + 8 <= __shfl_sync(~0u, through, w);
                const u64* from = (const u64*)(slots + (at[k] & ~7u));
                x[k] = whole[k] ? from[0] : 0;  // set in any case: or it has its register through all loops
                next[k] = whole[k] && at[k] & 7 ? from[1] : 0;
            }
#pragma unroll
            for (u32 k = 0; k < ROWS; ++k) {
                const u32 i = first + k * 256 + lane * 8, skip = 8 * (at[k] & 7);
                if (whole[k]) *(u64*)(to + i) = skip ? x[k] >> skip | next[k] << (64 - skip) : x[k];
            }
        }
        // a word that is not of one slot has the end of a slot in it, or the beginning of them all
        u8 x[3];
        u32 i[3];
#pragma unroll
        for (u32 k = 0; k < 3; ++k) {
            const u32 end = __shfl_sync(~0u, through, lane / 8 + 4 * k);
            i[k] = ((k < 2 ? end + into : 0) & ~7u) + lane % 8 - into;
            const u32 at = place_of(i[k], slot_of(i[k]));
            x[k] = i[k] < total ? slots[at] : 0;
        }
#pragma unroll
        for (u32 k = 0; k < 3; ++k)
            if (i[k] < total) to[i[k]] = x[k];
    }
};

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void pack_tile(const FrameJob& job, u32 block, const TileCounts& counts, const u8* slots,
                                          u8* to) {
    const u32 lane = lane_of(), m = block_words(job.n, block), spill = spill_bytes(m);
    const u32 count = counts.of_warp[lane % WARPS] & COUNT_FIELD;
    const u32 through = warp_inclusive_sum(lane < WARPS ? count : 0);
    const u32 total = __shfl_sync(~0u, through, WARPS - 1);
    if (total > spill) {  // stored: over what encode wrote
        u8* record = (u8*)job.frame + records_begin(job.n) + u64(block) * RECORD_BYTES;
        const u32 used = record_bytes(m), held = 2 * m < used ? 2 * m : used;
#pragma unroll 1
        for (u32 i = held + lane; i < align128(used); i += 32) record[i] = 0;
        if constexpr (ELEMENT_BYTES == 2) {  // the words of others are moved in parts
            const u8* source = (const u8*)job.words + u64(block) * (BLOCK_WORDS * ELEMENT_BYTES);
            copy_words(record, source, 0, held);
            copy_words(to, source, held, 2 * m);
        }
    } else {
        const Slots all{slots, lane * SLOT_BYTES - (through - count), through};
        if (total > 512)  // else its last step, the bytes between slots, costs what it saves
            all.move_words(to, total);
        else
            all.move_bytes(to, total);
    }
}

// The header, and the padding of the directory, of one frame; by a thread block of its own.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void finish_frame(const FrameJob& job, FrameSums& sums, PackShared& shared) {
    const u32 t = threadIdx.x;
    u64* entries = (u64*)(job.frame + HEADER_BYTES);
    for (u64 i = job.tiles + t; i < align128(ENTRY_BYTES * u64(job.tiles)) / ENTRY_BYTES; i += PACK_THREADS)
        entries[i] = 0;
    if (t == 0) {
        u64* h = shared.header;
        h[0] = u64(ZIPCCL_MAGIC) | u64(ZIPCCL_FORMAT_VERSION) << 32 | u64(dtype_of(ELEMENT_BYTES)) << 48 |
               u64(ZIPCCL_SCHEME_FAST) << 56;
        h[1] = job.n;
        h[2] = static_bytes(job.n) + sums.dynamic_bytes;
        h[3] = sums.digest + mix64(4 * job.n + dtype_of(ELEMENT_BYTES));
        h[4] = sums.escapes;
        h[5] = BLOCK_WORDS;
        h[6] = h[7] = 0;
        h[8] = codebook_of(job);
        for (u32 i = 9; i < 15; ++i) h[i] = 0;
        sums = {0, 0, 0, 0};
    }
    __syncthreads();
    if (t < 32) {
        u64 check = warp_sum_all(t < 15 ? mix64(shared.header[t] ^ mix64(t + 1)) : 0);
        if (t < 16) {
            const u64 word = t < 15 ? shared.header[t] : check;
            ((u64*)job.frame)[t] = word;
            if (job.header_copy) ((u64*)job.header_copy)[t] = word;
        }
    }
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void pack_tiles(const JobTable& table, FrameSums* frame_sums, const TileCounts* counts,
                                           const u16* sizes, const u8* slots, u32 packers) {
    __shared__ PackShared shared;
    const FrameJob* jobs = table.all();
    if (blockIdx.x >= packers) {
        finish_frame<ELEMENT_BYTES>(jobs[blockIdx.x - packers], frame_sums[blockIdx.x - packers], shared);
        return;
    }
    const u32 t = threadIdx.x, lane = lane_of(), warp = warp_of();
    const u32 per_block = (table.tiles + packers - 1) / packers;  // tiles are below 2^31
    u32 begin = per_block * blockIdx.x, end = begin + per_block;
    if (end > table.tiles) end = table.tiles;
    u32 job = 0;
    u64 before = 0;  // dynamic bytes of this frame before `begin`
    bool fresh = true;
    while (begin < end) {
        u32 next_job = job_of_tile(jobs, job, begin);
        if (fresh)
            before = sum_sizes(sizes, jobs[next_job].first_tile, begin, shared);
        else if (next_job != job)
            before = 0;
        fresh = false;
        job = next_job;
        const FrameJob& frame = jobs[job];
        u32 job_end = frame.first_tile + frame.tiles;
        u32 chunk_end = begin + PACK_THREADS;
        if (chunk_end > end) chunk_end = end;
        if (chunk_end > job_end) chunk_end = job_end;
        const u32 count = chunk_end - begin;

        // offsets of up to PACK_THREADS tiles: an exclusive sum over the thread block
        u32 size = t < count ? sizes[begin + t] : 0;
        u32 inclusive = warp_inclusive_sum(size);
        __syncthreads();
        if (lane == 31) shared.warp_sums[warp] = inclusive;
        __syncthreads();
        u32 warp_total = lane < PACK_THREADS / 32 ? u32(shared.warp_sums[lane]) : 0;
        u32 warp_before = __shfl_sync(~0u, warp_inclusive_sum(warp_total) - warp_total, warp);
        u32 total = __reduce_add_sync(~0u, warp_total);
        u32 offset = warp_before + inclusive - size;
        shared.offsets[t] = offset;
        if (t == 0) shared.before = before + total, shared.begin = chunk_end;
        bool halves = false;
        if (t < count) {
            const u32 block = begin + t - frame.first_tile;
            const uint4 loaded = *(const uint4*)&counts[begin + t];
            *(uint4*)&shared.counts[t] = loaded;
            const TileCounts& of_tile = shared.counts[t];
            u64 entry = before + offset;
            if (escapes_of(of_tile) > spill_bytes(block_words(frame.n, block))) entry |= STORED_BIT;
            if (of_tile.of_warp[0] & LOW_FLAG) entry |= LOW_HALVES_BIT;
            ((u64*)(frame.frame + HEADER_BYTES))[block] = entry;
            halves = entry & (STORED_BIT | LOW_HALVES_BIT);
        }
        u8* dynamic = (u8*)frame.frame + static_bytes(frame.n) + before;
        if constexpr (ELEMENT_BYTES == 2) {
            __syncthreads();
        } else if (__syncthreads_or(halves)) {  // the last warp first: with few tiles, the first have escapes to move
#pragma unroll 1
            for (u32 i = PACK_THREADS / 32 - 1 - warp; i < count * PARTS; i += PACK_THREADS / 32) {
                const u32 tile = i / PARTS;
                move_part(frame, begin + tile - frame.first_tile, shared.counts[tile], dynamic + shared.offsets[tile],
                          i % PARTS);
            }
        }
#pragma unroll 1
        for (u32 i = warp; i < count; i += PACK_THREADS / 32)
            pack_tile<ELEMENT_BYTES>(frame, begin + i - frame.first_tile, shared.counts[i],
                                     slots + u64(begin + i) * ZIPCCL_SLOT_BYTES, dynamic + shared.offsets[i]);
        before = shared.before;
        begin = shared.begin;
    }
}

extern "C" __global__ void __launch_bounds__(PACK_THREADS, 2)
    pack_bfloat16_kernel(const __grid_constant__ JobTable table, FrameSums* frame_sums, const TileCounts* counts,
                         const u16* sizes, const u8* slots, u32 packers) {
    pack_tiles<2>(table, frame_sums, counts, sizes, slots, packers);
}
extern "C" __global__ void __launch_bounds__(PACK_THREADS, 2)
    pack_float32_kernel(const __grid_constant__ JobTable table, FrameSums* frame_sums, const TileCounts* counts,
                        const u16* sizes, const u8* slots, u32 packers) {
    pack_tiles<4>(table, frame_sums, counts, sizes, slots, packers);
}
