// Decoding (FORMAT.md 8): decode_*_kernel rebuilds, checks and digests the blocks of any number of frames.
//
// A persistent grid; a thread block takes every gridDim.x-th tile and loads the next ones while it computes. The
// directory says where everything is, so that no tile waits for another. The last thread block to end gives the
// verdicts, one a frame.
#include "reader.cuh"

template <u32 ELEMENT_BYTES>
struct DecodeCursor {
    u32 tile, job;
    Entries entries;

    // Move to a tile; its directory entries are asked for, not waited for.
    __device__ __forceinline__ void seek(const FrameJob* jobs, u32 to, u32 tiles) {
        tile = to;
        if (to >= tiles) return;
        job = job_of_tile(jobs, job, to);
        entries = read_entries(jobs[job], to - jobs[job].first_tile);
    }
    __device__ __forceinline__ void load(const FrameJob* jobs, u32 tiles, u8* stage, BlockPlan& plan, StageLoads loads,
                                         bool elected) {
        if (tile < tiles)
            load_block<ELEMENT_BYTES>(jobs[job], tile - jobs[job].first_tile, entries, stage, plan, loads, elected);
        loads.commit();
    }
};

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void decode_tiles(const JobTable& table, ReadScratch* scratch, Verdict* verdicts) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<ReadShared<ELEMENT_BYTES>*>(shared_bytes);
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;

    const u32 t = threadIdx.x;
    const bool elected = t == 0;
    const bool loader = !ZIPCCL_BULK || elected;
    const FrameJob* jobs = table.all();
    const u32 tiles = table.tiles;
    const Weights<ELEMENT_BYTES> weights;

    DecodeCursor<ELEMENT_BYTES> cursor{0, 0, {0, 0}};
#pragma unroll
    for (u32 s = 0; s < READ_STAGES; ++s) StageLoads{&shared.barriers[s]}.init(elected);
    __syncthreads();
#pragma unroll
    for (u32 s = 0; s < READ_STAGES; ++s) {
        if (loader) cursor.seek(jobs, blockIdx.x + s * gridDim.x, tiles);
        if (loader) cursor.load(jobs, tiles, shared.stage[s], shared.plan[s], StageLoads{&shared.barriers[s]}, elected);
    }
    if (loader) cursor.seek(jobs, blockIdx.x + READ_STAGES * gridDim.x, tiles);
    __syncthreads();

    u32 job = 0, current = ~0u, stage = 0, phases = 0;
    Codes codes(0);
    u64 digest = 0, escapes = 0;  // of the current job; in thread 32
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        job = job_of_tile(jobs, job, tile);
        const u64 block = tile - jobs[job].first_tile;
        const u32 m = block_words(jobs[job].n, block);
        if (job != current) {
            if (t == 32 && current != ~0u) {
                atomicAdd(&scratch->of_job[current].digest, digest);
                atomicAdd(&scratch->of_job[current].escapes, escapes);
                digest = escapes = 0;
            }
            codes = Codes(codebook_of_frame(jobs[job]));
            current = job;
        }
        StageLoads{&shared.barriers[stage]}.template wait<READ_STAGES - 1>(true, phases >> stage & 1);
        phases ^= 1u << stage;

        u32 low_seen;
        const u32 low = shared.plan[stage].low;
        const u32 block_escapes = rebuild_block<ELEMENT_BYTES>(shared, stage, block, m, codes, weights,
                                                               scratch->of_job[job], elected, low_seen);
        publish_shared();
        if (ELEMENT_BYTES == 4) {
            const bool any_low = __syncthreads_or(int(low_seen));
            if (low && !any_low && t == 0) report_fault(scratch->of_job[job], FAULT_CANONICAL, block, 0);
        } else {
            __syncthreads();
        }

        const u64 to = jobs[job].words + block * (BLOCK_WORDS * ELEMENT_BYTES);
        if (to % 16 == 0 && m * ELEMENT_BYTES % 16 == 0) {
            store_tile((void*)to, shared.elements, m * ELEMENT_BYTES, elected);
        } else {
            for (u32 i = t; i < m; i += THREADS) ((Element*)to)[i] = ((const Element*)shared.elements)[i];
        }
        commit_stores(elected);
        if (loader) {
            cursor.load(jobs, tiles, shared.stage[stage], shared.plan[stage], StageLoads{&shared.barriers[stage]},
                        elected);
            cursor.seek(jobs, cursor.tile + gridDim.x, tiles);
        }
        if (t == 32) {
            u64 block_sum = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) block_sum += shared.warp_sums[w];
            digest += mixed_block_sum(block_sum, block);
            escapes += block_escapes;
        }
        stage = stage + 1 == READ_STAGES ? 0 : stage + 1;
    }
    if (t == 32 && current != ~0u) {
        atomicAdd(&scratch->of_job[current].digest, digest);
        atomicAdd(&scratch->of_job[current].escapes, escapes);
    }
    wait_stores_read(elected);
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
extern "C" __constant__ u32 decode_shared_bytes[2] = {sizeof(ReadShared<2>), sizeof(ReadShared<4>)};
