// Encoding (FORMAT.md 2-6): encode_*_kernel writes all records, pack_*_kernel puts the dynamic parts in their places.
//
// encode: a persistent grid; a thread block takes every gridDim.x-th tile, loads the next ones while it computes, and
// leaves, per tile, the record in the frame, the escapes in a slot of the scratch, and three numbers. No tile waits for
// another. pack, launched behind it, sums the sizes before each tile, moves the few per cent that are dynamic, and
// writes directories and headers. No atomics anywhere: no order can show.
#include "layout.cuh"
#include "planes.cuh"
#include "tile.cuh"

constexpr u32 ENCODE_STAGES = 2;
constexpr u32 PACK_THREADS = 512;
constexpr u32 ESCAPES_FIELD = 0x3fff;  // of a tile's `flags`: escapes, then two flags
constexpr u32 STORED_FLAG = 1u << 14;
constexpr u32 LOW_FLAG = 1u << 15;
static_assert(BLOCK_WORDS <= ESCAPES_FIELD, "escapes of a block");
static_assert(ZIPCCL_SLOT_BYTES == SPILL_BYTES && SPILL_BYTES % 16 == 0, "a slot holds what a coded block may have");

template <u32 ELEMENT_BYTES>
struct EncodeShared {
    u8 tile[ENCODE_STAGES][BLOCK_WORDS * ELEMENT_BYTES];
    u8 record[RECORD_BYTES];
    u8 escapes[SPILL_BYTES];
    u32 unlike[56];
    u32 warp_escapes[WARPS];
    u64 warp_sums[WARPS];
    u64 barriers[ENCODE_STAGES];
};

// Tiles of 16-byte aligned elements are loaded ahead; others element by element when their turn comes.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ bool loads_ahead(u64 source, u32 m) {
    return source % 16 == 0 && m * ELEMENT_BYTES % 16 == 0;
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ u8 word_byte(const u8* tile, u32 i) {
    return ELEMENT_BYTES == 2 ? tile[i] : tile[(i >> 1) * 4 + 2 + (i & 1)];
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void start_tile_load(const FrameJob* jobs, u32& job, u32 tile, u32 tiles, u8* to,
                                                StageLoads loads, bool elected) {
    if (tile < tiles) {
        job = job_of_tile(jobs, job, tile);
        u64 block = tile - jobs[job].first_tile;
        u64 source = jobs[job].words + block * (BLOCK_WORDS * ELEMENT_BYTES);
        u32 m = block_words(jobs[job].n, block);
        if (loads_ahead<ELEMENT_BYTES>(source, m)) {
            loads.expect(m * ELEMENT_BYTES, elected);
            loads.load(to, (const void*)source, m * ELEMENT_BYTES, elected);
        }
    }
    loads.commit();
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void encode_tiles(const JobTable& table, u64* block_sums, u32* flags, u16* sizes,
                                             u8* slots) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<EncodeShared<ELEMENT_BYTES>*>(shared_bytes);
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;

    const u32 t = threadIdx.x, lane = t & 31, warp = t >> 5, rotation = slot_rotation();
    const bool elected = t == 0;
    const FrameJob* jobs = table.all();
    const u32 tiles = table.tiles;
    const Weights<ELEMENT_BYTES> weights;

    StageLoads loads[ENCODE_STAGES];
    u32 load_job = 0;
#pragma unroll
    for (u32 s = 0; s < ENCODE_STAGES; ++s) {
        loads[s].barrier = &shared.barriers[s];
        loads[s].init(elected);
    }
    __syncthreads();
#pragma unroll
    for (u32 s = 0; s < ENCODE_STAGES; ++s)
        start_tile_load<ELEMENT_BYTES>(jobs, load_job, blockIdx.x + s * gridDim.x, tiles, shared.tile[s], loads[s],
                                       elected);

    u32 job = 0, coded_job = ~0u, stage = 0, phases = 0;
    Codes codes(0);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        job = job_of_tile(jobs, job, tile);
        const u64 block = tile - jobs[job].first_tile;
        const u32 m = block_words(jobs[job].n, block);
        const u64 source = jobs[job].words + block * (BLOCK_WORDS * ELEMENT_BYTES);
        const u64 record = jobs[job].frame + records_begin(jobs[job].n) + block * RECORD_BYTES;
        u8* elements = shared.tile[stage];

        if (job != coded_job) {  // uniform over the thread block
            u64 exponents = jobs[job].codebook_address ? *(const volatile u64*)jobs[job].codebook_address
                                                       : jobs[job].codebook;
            codes = Codes(exponents & ((1ull << 56) - 1));
            if (t < 56) shared.unlike[t] = (exponents >> t & 1) ? 0 : ~0u;
            coded_job = job;
            __syncthreads();
        }

        const bool ahead = loads_ahead<ELEMENT_BYTES>(source, m);
        StageLoads{&shared.barriers[stage]}.template wait<ENCODE_STAGES - 1>(ahead, phases >> stage & 1);
        phases ^= u32(ahead) << stage;
        if (!ahead || m < BLOCK_WORDS) {
            if (!ahead)
                for (u32 i = t; i < m; i += THREADS) ((Element*)elements)[i] = ((const Element*)source)[i];
            for (u32 i = m + t; i < BLOCK_WORDS; i += THREADS) ((Element*)elements)[i] = 0;
            __syncthreads();
        }

        // This thread's 32 words, from its elements; digest and low halves on the way.
        u32 v[16], low = 0;
        u64 sum = 0;
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot) {
            u32 chunk = (slot + rotation) & 3;
            if (ELEMENT_BYTES == 2) {
                uint4 x = *(const uint4*)(elements + t * 64 + chunk * 16);
                v[slot * 4] = x.x, v[slot * 4 + 1] = x.y, v[slot * 4 + 2] = x.z, v[slot * 4 + 3] = x.w;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) sum += u64(v[slot * 4 + i]) * weights.w[slot * 4 + i];
            } else {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    uint4 x = *(const uint4*)(elements + t * 128 + chunk * 32 + half * 16);
                    const u32* w = &weights.w[(slot * 8 + half * 4) % (4 * Weights<ELEMENT_BYTES>::CHUNK)];
                    sum += u64(x.x) * w[0];
                    sum += u64(x.y) * w[1];
                    sum += u64(x.z) * w[2];
                    sum += u64(x.w) * w[3];
                    low |= x.x | x.y | x.z | x.w;
                    v[slot * 4 + half * 2] = bytes_of(x.x, x.y, 0x7632);
                    v[slot * 4 + half * 2 + 1] = bytes_of(x.z, x.w, 0x7632);
                }
            }
        }

        u32 sign_mantissa[8], plane[8], code[3];
#pragma unroll
        for (u32 q = 0; q < 8; ++q) sign_mantissa[q] = sign_mantissa_of(v[q * 2], v[q * 2 + 1]);
        exponent_planes(v, plane);
        if (codes.contiguous)
            code_planes_of_run(plane, (codes.low >> 8) - 1, code);
        else
            code_planes_of_set(plane, shared.unlike, code);
        const u32 valid = valid_words(m);
#pragma unroll
        for (u32 p = 0; p < 3; ++p) {
            u32 turned = in_slot_order(code[p]);
            code[p] = __funnelshift_l(turned, turned, 8 * rotation) & valid;
        }
        u32 escaped = ~(code[0] | code[1] | code[2]) & valid;

        const u32 count = __popc(escaped);
        const u32 inclusive = warp_inclusive_sum(count);
        sum = warp_sum_all(sum);
        if (lane == 31) shared.warp_escapes[warp] = inclusive, shared.warp_sums[warp] = sum;
        wait_stores_read(elected);
        bool any_low = false;
        if (ELEMENT_BYTES == 4)
            any_low = __syncthreads_or(int(low & 0xffff));
        else
            __syncthreads();

        u32 total = 0, position = inclusive - count;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) {
            if (w == warp) position += total;
            total += shared.warp_escapes[w];
        }
        const u32 spill = spill_bytes(m);
        const bool stored = total > spill;
        if (t == 32) {
            u64 block_sum = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) block_sum += shared.warp_sums[w];
            block_sums[tile] = mixed_block_sum(block_sum, block);
            flags[tile] = total | (stored ? STORED_FLAG : 0) | (any_low ? LOW_FLAG : 0);
            sizes[tile] = u16((stored ? spill : total) + (any_low ? 2 * m : 0));
        }

        if (!stored || m < BLOCK_WORDS) {
#pragma unroll
            for (u32 slot = 0; slot < 4; ++slot)
                *(uint2*)(shared.record + t * 32 + ((slot + rotation) & 3) * 8) =
                    make_uint2(sign_mantissa[slot * 2], sign_mantissa[slot * 2 + 1]);
#pragma unroll
            for (u32 p = 0; p < 3; ++p) *(u32*)(shared.record + BLOCK_WORDS + p * PLANE_BYTES + t * 4) = code[p];
        }
        if (!stored) {
            const u32 first = t * THREAD_WORDS;
            while (escaped) {
                u32 i = first + __ffs(escaped) - 1;
                escaped &= escaped - 1;
                u32 word = ELEMENT_BYTES == 2 ? ((const u16*)elements)[i] : ((const u16*)elements)[2 * i + 1];
                shared.escapes[position++] = u8(word >> 7);
            }
        } else if (m == BLOCK_WORDS) {
            for (u32 i = t * 4; i < RECORD_BYTES; i += THREADS * 4) {
                u32 x;
                if (ELEMENT_BYTES == 2)
                    x = *(const u32*)(elements + i);
                else
                    x = bytes_of(*(const u32*)(elements + i * 2), *(const u32*)(elements + i * 2 + 4), 0x7632);
                *(u32*)(shared.record + i) = x;
            }
        }
        publish_shared();
        __syncthreads();

        if (m == BLOCK_WORDS) {
            store_tile((void*)record, shared.record, RECORD_BYTES, elected);
        } else {  // the planes of a short block lie closer together; byte by byte, once a frame
            u32 used = record_bytes(m), plane_bytes = (m + 7) / 8;
            for (u32 i = t; i < align128(used); i += THREADS) {
                u8 x = 0;
                if (stored)
                    x = i < used && i < 2 * m ? word_byte<ELEMENT_BYTES>(elements, i) : 0;
                else if (i < m)
                    x = shared.record[i];
                else if (i < used)
                    x = shared.record[BLOCK_WORDS + (i - m) / plane_bytes * PLANE_BYTES + (i - m) % plane_bytes];
                ((u8*)record)[i] = x;
            }
            __syncthreads();
        }
        if (!stored)
            store_tile(slots + u64(tile) * SPILL_BYTES, shared.escapes, (total + 15) & ~15u, elected);
        commit_stores(elected);
        start_tile_load<ELEMENT_BYTES>(jobs, load_job, tile + ENCODE_STAGES * gridDim.x, tiles, elements,
                                       StageLoads{&shared.barriers[stage]}, elected);
        stage = stage + 1 == ENCODE_STAGES ? 0 : stage + 1;
    }
    wait_stores_read(elected);
}

extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_ENCODE_BLOCKS_2)
    encode_bfloat16_kernel(const __grid_constant__ JobTable table, u64* block_sums, u32* flags, u16* sizes, u8* slots) {
    encode_tiles<2>(table, block_sums, flags, sizes, slots);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_ENCODE_BLOCKS_4)
    encode_float32_kernel(const __grid_constant__ JobTable table, u64* block_sums, u32* flags, u16* sizes, u8* slots) {
    encode_tiles<4>(table, block_sums, flags, sizes, slots);
}

extern "C" __constant__ u32 encode_shared_bytes[2] = {sizeof(EncodeShared<2>), sizeof(EncodeShared<4>)};

// --- pack -------------------------------------------------------------------------------------------------------------

struct PackShared {
    u64 warp_sums[PACK_THREADS / 32];
    u32 offsets[PACK_THREADS];
    u64 header[16];
};

__device__ __forceinline__ u64 block_sum_all(u64 x, PackShared& shared) {
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared.warp_sums[threadIdx.x >> 5] = x;
    __syncthreads();
    const u32 lane = threadIdx.x & 31;
    return warp_sum_all(lane < PACK_THREADS / 32 ? shared.warp_sums[lane] : 0);
}

// Sum of sizes[first .. end), by all threads.
__device__ __forceinline__ u64 sum_sizes(const u16* sizes, u64 first, u64 end, PackShared& shared) {
    u64 sum = 0;
    u64 aligned_first = (first + 7) & ~7ull, aligned_end = end & ~7ull;
    if (aligned_first >= aligned_end) {
        for (u64 i = first + threadIdx.x; i < end; i += PACK_THREADS) sum += sizes[i];
    } else {
        if (threadIdx.x < aligned_first - first) sum += sizes[first + threadIdx.x];
        if (threadIdx.x < end - aligned_end) sum += sizes[aligned_end + threadIdx.x];
        u32 part = 0;  // of at most 2^13 vectors a thread between two carries
        for (u64 i = aligned_first + threadIdx.x * 8; i < aligned_end; i += PACK_THREADS * 8) {
            uint4 x = *(const uint4*)(sizes + i);
            part += (x.x & 0xffff) + (x.x >> 16) + (x.y & 0xffff) + (x.y >> 16) + (x.z & 0xffff) + (x.z >> 16) +
                    (x.w & 0xffff) + (x.w >> 16);
            if (part >> 31) sum += part, part = 0;
        }
        sum += part;
    }
    return block_sum_all(sum, shared);
}

// A warp copies n_bytes to `to`, at any alignment, 4 bytes a lane; word(s) gives the 4 bytes from byte s on, byte(s) one.
template <class Word, class Byte>
__device__ __forceinline__ void copy_bytes(u8* to, u32 n_bytes, Word word, Byte byte) {
    const u32 lane = threadIdx.x & 31;
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

// 4 bytes from byte s on of the upper (half = 1) or lower halves of 32-bit elements.
__device__ __forceinline__ u32 load_halves(const u32* elements, u32 s, u32 half) {
    const u32* e = elements + (s >> 1);
    u32 selector = half ? 0x7632 : 0x5410;
    u32 pair = bytes_of(e[0], e[1], selector);
    return s & 1 ? __funnelshift_r(pair, half ? e[2] >> 16 : e[2], 8) : pair;
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void pack_tile(const FrameJob& job, u64 block, u32 flag, const u8* slot, u8* to) {
    const u32 m = block_words(job.n, block);
    const u8* source = (const u8*)job.words + block * (BLOCK_WORDS * ELEMENT_BYTES);
    if (flag & STORED_FLAG) {
        const u32 held = 2 * m - spill_bytes(m);
        if (ELEMENT_BYTES == 2) {
            copy_bytes(
                to, spill_bytes(m), [=](u32 s) { return load_unaligned(source + held + s); },
                [=](u32 s) { return source[held + s]; });
        } else {
            copy_bytes(
                to, spill_bytes(m), [=](u32 s) { return load_halves((const u32*)source, held + s, 1); },
                [=](u32 s) { return word_byte<ELEMENT_BYTES>(source, held + s); });
        }
        to += spill_bytes(m);
    } else {
        copy_bytes(
            to, flag & ESCAPES_FIELD, [=](u32 s) { return load_unaligned(slot + s); }, [=](u32 s) { return slot[s]; });
        to += flag & ESCAPES_FIELD;
    }
    if (ELEMENT_BYTES == 4 && (flag & LOW_FLAG))
        copy_bytes(
            to, 2 * m, [=](u32 s) { return load_halves((const u32*)source, s, 0); },
            [=](u32 s) { return source[(s >> 1) * 4 + (s & 1)]; });
}

// The header, and the padding of the directory, of one frame; by a thread block of its own.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void finish_frame(const FrameJob& job, const u64* block_sums, const u32* flags,
                                             const u16* sizes, PackShared& shared) {
    const u32 t = threadIdx.x;
    u64 digest = 0, escapes = 0;
    for (u64 i = t; i < job.tiles; i += PACK_THREADS) {
        digest += block_sums[job.first_tile + i];
        escapes += flags[job.first_tile + i] & ESCAPES_FIELD;
    }
    digest = block_sum_all(digest, shared) + mix64(4 * job.n + dtype_of(ELEMENT_BYTES));
    escapes = block_sum_all(escapes, shared);
    u64 dynamic = sum_sizes(sizes, job.first_tile, u64(job.first_tile) + job.tiles, shared);
    u64* entries = (u64*)(job.frame + HEADER_BYTES);
    for (u64 i = job.tiles + t; i < align128(ENTRY_BYTES * u64(job.tiles)) / ENTRY_BYTES; i += PACK_THREADS)
        entries[i] = 0;
    if (t == 0) {
        u64 exponents = job.codebook_address ? *(const u64*)job.codebook_address : job.codebook;
        u64* h = shared.header;
        h[0] = u64(ZIPCCL_MAGIC) | u64(ZIPCCL_FORMAT_VERSION) << 32 | u64(dtype_of(ELEMENT_BYTES)) << 48 |
               u64(ZIPCCL_SCHEME_FAST) << 56;
        h[1] = job.n;
        h[2] = static_bytes(job.n) + dynamic;
        h[3] = digest;
        h[4] = escapes;
        h[5] = BLOCK_WORDS;
        h[6] = h[7] = 0;
        h[8] = exponents & ((1ull << 56) - 1);
        for (u32 i = 9; i < 15; ++i) h[i] = 0;
        h[15] = header_check(h);
    }
    __syncthreads();
    if (t < 16) ((u64*)job.frame)[t] = shared.header[t];
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void pack_tiles(const JobTable& table, const u64* block_sums, const u32* flags,
                                           const u16* sizes, const u8* slots, u32 packers) {
    __shared__ PackShared shared;
    const FrameJob* jobs = table.all();
    if (blockIdx.x >= packers) {
        finish_frame<ELEMENT_BYTES>(jobs[blockIdx.x - packers], block_sums, flags, sizes, shared);
        return;
    }
    const u32 t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const u64 per_block = (u64(table.tiles) + packers - 1) / packers;
    u64 begin = per_block * blockIdx.x, end = begin + per_block;
    if (end > table.tiles) end = table.tiles;
    u32 job = 0;
    u64 before = 0;  // dynamic bytes of this frame before `begin`
    bool fresh = true;
    while (begin < end) {
        u32 next_job = job_of_tile(jobs, job, u32(begin));
        if (fresh) before = sum_sizes(sizes, jobs[next_job].first_tile, begin, shared);
        else if (next_job != job) before = 0;
        fresh = false;
        job = next_job;
        const FrameJob& frame = jobs[job];
        u64 job_end = u64(frame.first_tile) + frame.tiles;
        u64 chunk_end = begin + PACK_THREADS;
        if (chunk_end > end) chunk_end = end;
        if (chunk_end > job_end) chunk_end = job_end;
        const u32 count = u32(chunk_end - begin);

        // offsets of up to PACK_THREADS tiles: an exclusive sum over the thread block
        u32 size = t < count ? sizes[begin + t] : 0;
        u32 inclusive = warp_inclusive_sum(size);
        __syncthreads();
        if (lane == 31) shared.warp_sums[warp] = inclusive;
        __syncthreads();
        u32 warp_total = lane < PACK_THREADS / 32 ? u32(shared.warp_sums[lane]) : 0;
        u32 warp_before = __shfl_sync(~0u, warp_inclusive_sum(warp_total) - warp_total, warp);
        u32 total = __reduce_add_sync(~0u, warp_total);
        shared.offsets[t] = warp_before + inclusive - size;
        if (t < count) {
            u32 flag = flags[begin + t];
            u64 entry = (before + warp_before + inclusive - size) | (flag & STORED_FLAG ? STORED_BIT : 0) |
                        (flag & LOW_FLAG ? LOW_HALVES_BIT : 0);
            ((u64*)(frame.frame + HEADER_BYTES))[begin + t - frame.first_tile] = entry;
        }
        __syncthreads();
        u8* dynamic = (u8*)frame.frame + static_bytes(frame.n) + before;
#pragma unroll 1
        for (u32 i = warp; i < count; i += PACK_THREADS / 32)
            pack_tile<ELEMENT_BYTES>(frame, begin + i - frame.first_tile, flags[begin + i],
                                     slots + (begin + i) * SPILL_BYTES, dynamic + shared.offsets[i]);
        before += total;
        begin = chunk_end;
    }
}

extern "C" __global__ void __launch_bounds__(PACK_THREADS, 2)
    pack_bfloat16_kernel(const __grid_constant__ JobTable table, const u64* block_sums, const u32* flags,
                         const u16* sizes, const u8* slots, u32 packers) {
    pack_tiles<2>(table, block_sums, flags, sizes, slots, packers);
}
extern "C" __global__ void __launch_bounds__(PACK_THREADS, 2)
    pack_float32_kernel(const __grid_constant__ JobTable table, const u64* block_sums, const u32* flags,
                        const u16* sizes, const u8* slots, u32 packers) {
    pack_tiles<4>(table, block_sums, flags, sizes, slots, packers);
}
