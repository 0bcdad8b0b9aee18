// What a frame looks like (FORMAT.md 2-6), and what a launch is told. Included by every kernel; includes nothing.
//
// The ZIPCCL_* constants come from frame.py through -D flags (jit.py); the assertions below tie the kernels' own
// geometry to them, so that neither can change alone.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <u32 N_BYTES>
struct UnsignedOf;
template <>
struct UnsignedOf<2> {
    typedef u16 type;
};
template <>
struct UnsignedOf<4> {
    typedef u32 type;
};

constexpr u32 BLOCK_WORDS = ZIPCCL_BLOCK_WORDS;
constexpr u32 HEADER_BYTES = ZIPCCL_HEADER_BYTES;
constexpr u32 ALIGN_BYTES = ZIPCCL_ALIGN_BYTES;
constexpr u32 ENTRY_BYTES = ZIPCCL_DIRECTORY_ENTRY_BYTES;
constexpr u32 PLANES = ZIPCCL_PLANES;
constexpr u32 PLANE_BYTES = BLOCK_WORDS / 8;
constexpr u32 RECORD_BYTES = ZIPCCL_RECORD_BYTES;    // R of a full block
constexpr u32 SPILL_BYTES = ZIPCCL_SPILL_BYTES;      // the most escapes of a coded full block
constexpr u32 SAMPLE_LOG2_WORDS = ZIPCCL_SAMPLE_LOG2_WORDS;
constexpr u32 HISTOGRAM_DEPTH = ZIPCCL_HISTOGRAM_DEPTH;
constexpr u64 OFFSET_MASK = (1ull << 56) - 1;
constexpr u64 STORED_BIT = 1ull << 56;
constexpr u64 LOW_HALVES_BIT = 1ull << 57;
constexpr u64 RESERVED_BITS = ~(OFFSET_MASK | STORED_BIT | LOW_HALVES_BIT);

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 WARP_WORDS = BLOCK_WORDS / WARPS;
constexpr u32 BLOCK_THREADS = THREADS + 32;  // and a warp that loads, and adds up
constexpr u32 THREAD_WORDS = 32;  // consecutive words a thread handles: one 32-bit piece of each code plane

static_assert(BLOCK_WORDS == THREADS * THREAD_WORDS, "a thread handles 32 words of a block");
static_assert(BLOCK_THREADS == ZIPCCL_BLOCK_THREADS, "jit.py launches this");
static_assert(PLANES == 3, "the kernels hold codes of 3 bits");
static_assert(RECORD_BYTES == BLOCK_WORDS + PLANES * PLANE_BYTES, "FORMAT.md 2.3");
static_assert(RECORD_BYTES % ALIGN_BYTES == 0, "a full record needs no padding");
static_assert(SPILL_BYTES == 2 * BLOCK_WORDS - RECORD_BYTES, "FORMAT.md 4.4");
static_assert(ALIGN_BYTES % 16 == 0 && HEADER_BYTES % 16 == 0, "16-byte copies");
static_assert(OFFSET_MASK == ZIPCCL_OFFSET_MASK && STORED_BIT == ZIPCCL_STORED_BIT, "FORMAT.md 5.1");
static_assert(LOW_HALVES_BIT == ZIPCCL_LOW_HALVES_BIT && RESERVED_BITS == ZIPCCL_RESERVED_DIRECTORY_BITS, "5.1");

// One frame of a launch; jit.py packs the same 64 bytes.
struct FrameJob {
    u64 words;            // address of the elements (source of an encoder, destination of a decoder), or 0
    u64 frame;            // address of the frame, 128-byte aligned; 0 for a source that is not encoded
    u64 n;                // elements
    u64 capacity_bytes;   // bytes of the buffer the frame lies in
    u64 codebook_address; // encoder: where the device holds the 8 bytes of a codebook, or 0
    u64 codebook;         // encoder: the 7 exponents, ascending, from the lowest byte; decoder: unused
    u32 first_tile;       // tiles (blocks) of the jobs before this one
    u32 tiles;            // blocks of this frame that the launch handles
    u64 header_copy;      // encoder: where the frame's header goes as well, in memory of the host; or 0
};
static_assert(sizeof(FrameJob) == ZIPCCL_JOB_BYTES, "jit.py packs this");

// All frames of a launch. Up to INLINE_JOBS travel with the launch itself; more lie in device memory.
constexpr u32 INLINE_JOBS = ZIPCCL_INLINE_JOBS;
struct JobTable {
    u32 jobs;
    u32 tiles;
    u64 address;  // of FrameJob[jobs], or 0: inline_jobs
    FrameJob inline_jobs[INLINE_JOBS];

    __device__ __forceinline__ const FrameJob* all() const {
        return address ? reinterpret_cast<const FrameJob*>(address) : inline_jobs;
    }
};

// Dtype (FORMAT.md 1.1) of elements of 2 or 4 bytes.
__host__ __device__ constexpr u32 dtype_of(u32 element_bytes) {
    return element_bytes == 2 ? ZIPCCL_DTYPE_BFLOAT16 : ZIPCCL_DTYPE_FLOAT32;
}

__device__ __forceinline__ u64 align128(u64 n_bytes) { return (n_bytes + 127) & ~127ull; }
__device__ __forceinline__ u32 record_bytes(u32 m) { return m + PLANES * ((m + 7) / 8); }
__device__ __forceinline__ u32 spill_bytes(u32 m) {
    u32 record = record_bytes(m);
    return 2 * m > record ? 2 * m - record : 0;
}
__device__ __forceinline__ u64 block_count(u64 n) { return (n + BLOCK_WORDS - 1) / BLOCK_WORDS; }
__device__ __forceinline__ u64 records_begin(u64 n) { return HEADER_BYTES + align128(ENTRY_BYTES * block_count(n)); }
__device__ __forceinline__ u64 static_bytes(u64 n) {
    u32 rest = u32(n % BLOCK_WORDS);
    return records_begin(n) + n / BLOCK_WORDS * RECORD_BYTES + (rest ? align128(record_bytes(rest)) : 0);
}
__device__ __forceinline__ u64 max_frame_bytes(u64 n, u32 element_bytes) {
    u32 rest = u32(n % BLOCK_WORDS);
    return static_bytes(n) + n / BLOCK_WORDS * SPILL_BYTES + (rest ? spill_bytes(rest) : 0) +
           (element_bytes == 4 ? 2 * n : 0);
}
__device__ __forceinline__ u32 block_words(u64 n, u64 block) {
    u64 left = n - block * BLOCK_WORDS;
    return left < BLOCK_WORDS ? u32(left) : BLOCK_WORDS;
}

// FORMAT.md 6.1 and 6.3.
__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
__host__ __device__ constexpr u32 digest_weight(u32 k) {
    u32 x = (k + 1) * 0x9E3779B1u;
    x = (x ^ (x >> 15)) * 0x85EBCA77u;
    return (x ^ (x >> 13)) | 1u;
}
__device__ __forceinline__ u64 mixed_block_sum(u64 block_sum, u64 block) { return mix64(block_sum ^ mix64(block + 1)); }

// Header_Check of 16 64-bit words of which the last is not looked at (FORMAT.md 3.2).
__device__ __forceinline__ u64 header_check(const u64* header) {
    u64 sum = 0;
    for (u32 i = 0; i < 15; ++i) sum += mix64(header[i] ^ mix64(i + 1));
    return sum;
}

// The job that a tile belongs to, looking forward from `job`; tiles of a thread block only ever grow.
__device__ __forceinline__ u32 job_of_tile(const FrameJob* jobs, u32 job, u32 tile) {
    while (tile - jobs[job].first_tile >= jobs[job].tiles) ++job;
    return job;
}

// Where a job's tiles are, in registers: a table is far away, and most tiles are of the job of the tile before.
struct JobTiles {
    u32 job, first_tile, tiles, full_blocks, rest;

    __device__ __forceinline__ JobTiles() : job(~0u), first_tile(0), tiles(0), full_blocks(0), rest(0) {}
    __device__ __forceinline__ bool holds(u32 tile) const { return tile - first_tile < tiles; }
    __device__ __forceinline__ void seek(const FrameJob* jobs, u32 tile) {
        job = job_of_tile(jobs, job == ~0u ? 0 : job, tile);
        first_tile = jobs[job].first_tile;
        tiles = jobs[job].tiles;
        full_blocks = u32(jobs[job].n / BLOCK_WORDS);
        rest = u32(jobs[job].n % BLOCK_WORDS);
    }
    __device__ __forceinline__ u32 words(u32 block) const { return block < full_blocks ? BLOCK_WORDS : rest; }
};
