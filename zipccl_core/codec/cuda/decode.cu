// Decoding (FORMAT.md 8): decode_*_kernel rebuilds, checks and digests the blocks of any number of frames.
//
// A persistent grid; a thread block takes every gridDim.x-th tile, and its warps an eighth each. The directory says
// where everything is, so that no tile waits for another. The last thread block to end gives the verdicts, one a frame.
#include "reader.cuh"

constexpr u32 DECODE_STAGES = ZIPCCL_DECODE_STAGES;

template <u32 ELEMENT_BYTES>
struct DecodeShared : ReadShared<ELEMENT_BYTES, DECODE_STAGES> {
    // of the last warps to leave, which take turns
    JobTiles load_job;
    LoadSource source;  // of load_job
    u32 job;
    u64 digest, escapes;
};

// Load a tile into a stage, and the window for the tile that comes into it next.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void load_tile(DecodeShared<ELEMENT_BYTES>& shared, u32 s, const FrameJob* jobs, u32 tile,
                                          u32 tiles, bool from_window) {
    if (tile >= tiles) return;
    JobTiles job = shared.load_job;
    if (!job.holds(tile)) {
        job.seek(jobs, tile);
        const FrameJob& of = jobs[job.job];
        const LoadSource source{of.frame, static_bytes(of.n), records_begin(of.n), of.capacity_bytes, of.tiles};
        __syncwarp();
        if (lane_of() == 0) {
            shared.load_job = job;
            shared.source = source;
        }
        __syncwarp();
    }
    const LoadSource source = shared.source;
    const u32 block = tile - job.first_tile;
    const Entries entries =
        from_window ? window_entries(shared.window(s), source, block) : read_entries(source, block);
    const u32 next = tile + DECODE_STAGES * gridDim.x;
    u64 window = 0;
    if (next < tiles) {
        if (job.holds(next)) {
            window = window_address(source.frame, next - job.first_tile);
        } else {
            const u32 other = job_of_tile(jobs, job.job, next);
            window = window_address(jobs[other].frame, next - jobs[other].first_tile);
        }
    }
    load_block<ELEMENT_BYTES>(shared, s, source, block, job.words(block), entries, window);
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void add_to_job(const DecodeShared<ELEMENT_BYTES>& shared, ReadScratch* scratch) {
    if (shared.job == ~0u) return;
    atomicAdd(&scratch->of_job[shared.job].digest, shared.digest);
    atomicAdd(&scratch->of_job[shared.job].escapes, shared.escapes);
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void decode_tiles(const JobTable& table, ReadScratch* scratch, Verdict* verdicts) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<DecodeShared<ELEMENT_BYTES>*>(shared_bytes);
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;

    const u32 lane = lane_of(), warp = warp_of();
    const FrameJob* jobs = table.all();
    const u32 tiles = table.tiles;
    if (threadIdx.x == 0) {
        shared.job = ~0u;
        shared.load_job = JobTiles();
        shared.digest = shared.escapes = 0;
    }
    shared.init();
    if (warp == 0) {
#pragma unroll 1
        for (u32 s = 0; s < DECODE_STAGES; ++s)
            load_tile<ELEMENT_BYTES>(shared, s, jobs, blockIdx.x + s * gridDim.x, tiles, false);
    }

    JobTiles job;
    u64 out = 0;
    u32 stage = 0, phases = 0;
    Codes codes(0);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (!job.holds(tile)) {
            job.seek(jobs, tile);
            codes = Codes(codebook_of_frame(jobs[job.job].frame));
            out = jobs[job.job].words;
        }
        const u32 block = tile - job.first_tile, m = job.words(block);
        wait_barrier(&shared.loaded[stage], phases >> stage & 1);
        const BlockPlan plan = shared.plan[stage];
        rebuild_words<ELEMENT_BYTES>(shared, stage, block, m, codes, phases >> stage & 1, scratch, job.job);
        phases ^= 1u << stage;

        u64 sum = 0;
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
            for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q)
                sum += weighted(*(const uint4*)(shared.elements + chunk_offset<ELEMENT_BYTES>(slot) + q * 16),
                                weights_of<ELEMENT_BYTES>(slot, q));
        sum = warp_sum_all(sum);
        if (lane == 0) shared.sums[stage][warp] = sum;

        publish_to_stores();
        const u32 first = warp * WARP_WORDS;
        const u32 mine = m <= first ? 0 : m - first < WARP_WORDS ? m - first : WARP_WORDS;
        const u8* from = shared.elements + first * ELEMENT_BYTES;
        const u64 to = out + u64(block) * (BLOCK_WORDS * ELEMENT_BYTES) + first * ELEMENT_BYTES;
        if (to % 16 == 0 && mine * ELEMENT_BYTES % 16 == 0) {
            store_piece(to, from, mine * ELEMENT_BYTES);
        } else {
#pragma unroll 1
            for (u32 i = lane; i < mine; i += 32) ((Element*)to)[i] = ((const Element*)from)[i];
        }
        commit_stores();

        if (last_to_leave(&shared.left[stage])) {
            const BlockParts parts = parts_of_block<ELEMENT_BYTES>(shared, stage);
            load_tile<ELEMENT_BYTES>(shared, stage, jobs, tile + DECODE_STAGES * gridDim.x, tiles, true);
            const BlockResult result = finish_block<ELEMENT_BYTES>(parts, plan, block, m, scratch, job.job);
            if (lane == 0) {
                if (job.job != shared.job) {
                    add_to_job(shared, scratch);
                    shared.job = job.job;
                    shared.digest = shared.escapes = 0;
                }
                shared.digest += result.mixed;
                shared.escapes += result.escapes;
            }
        }
        stage = stage + 1 == DECODE_STAGES ? 0 : stage + 1;
    }
    wait_stores_read();
    __syncthreads();
    if (threadIdx.x == 0) add_to_job(shared, scratch);
    finish_reading<ELEMENT_BYTES>(jobs, table.jobs, scratch, verdicts, &shared.last);
}

extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_DECODE_BLOCKS_2)
    decode_bfloat16_kernel(const __grid_constant__ JobTable table, ReadScratch* scratch, Verdict* verdicts) {
    decode_tiles<2>(table, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(THREADS, ZIPCCL_DECODE_BLOCKS_4)
    decode_float32_kernel(const __grid_constant__ JobTable table, ReadScratch* scratch, Verdict* verdicts) {
    decode_tiles<4>(table, scratch, verdicts);
}
extern "C" __constant__ u32 decode_shared_bytes[2] = {sizeof(DecodeShared<2>), sizeof(DecodeShared<4>)};
