// Decoding (FORMAT.md 8): decode_*_kernel rebuilds, checks and digests the blocks of any number of frames.
//
// A persistent grid; a thread block takes every gridDim.x-th tile, and its warps an eighth each. The directory says
// where everything is, so that no tile waits for another. The last thread block to end gives the verdicts, one a frame.
#include "reader.cuh"

constexpr u32 DECODE_STAGES = ZIPCCL_DECODE_STAGES;

// Words are rebuilt in one place while those of the tile before are stored from another, if there is room for two.
template <u32 ELEMENT_BYTES>
constexpr u32 DECODE_OUTPUTS = ELEMENT_BYTES == 2 ? 2 : 1;

template <u32 ELEMENT_BYTES>
using DecodeShared = ReadShared<ELEMENT_BYTES, DECODE_STAGES, DECODE_OUTPUTS<ELEMENT_BYTES>>;

// The next tile to load: where it is, and its directory entries, on their way.
struct DecodeLoad {
    JobTiles job;
    LoadSource source;
    u32 tile;
    Entries entries;

    __device__ __forceinline__ void seek(const FrameJob* jobs, u32 to, u32 tiles) {
        tile = to;
        if (tile >= tiles) return;
        if (!job.holds(tile)) {
            job.seek(jobs, tile);
            const FrameJob& of = jobs[job.job];
            source = {of.frame, static_bytes(of.n), records_begin(of.n), of.capacity_bytes, of.tiles};
        }
        entries = read_entries(source, tile - job.first_tile);
    }
};

// The loading warp: loads tiles ahead, and judges those that the others are done with.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void feed_decoders(const JobTable& table, DecodeShared<ELEMENT_BYTES>& shared,
                                              ReadScratch* scratch) {
    const u32 tiles = table.tiles;
    const FrameJob* jobs = table.all();
    DecodeLoad load;
    JobTiles job;
    u64 digest = 0, escapes = 0;
    StageCursor<DECODE_STAGES> cursor;
    load.seek(jobs, blockIdx.x, tiles);
#pragma unroll 1
    for (u32 s = 0; s < DECODE_STAGES && load.tile < tiles; ++s) {
        const u32 block = load.tile - load.job.first_tile;
        load_block<ELEMENT_BYTES>(shared, s, load.source, block, load.job.words(block), load.entries);
        load.seek(jobs, load.tile + gridDim.x, tiles);
    }
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, cursor.advance()) {
        const u32 s = cursor.stage;
        wait_barrier(&shared.stages.empty[s], cursor.parity);
        const BlockPlan plan = shared.plan[s];
        const BlockParts parts = parts_of_block<ELEMENT_BYTES>(shared, s);
        if (load.tile < tiles) {
            const u32 block = load.tile - load.job.first_tile;
            load_block<ELEMENT_BYTES>(shared, s, load.source, block, load.job.words(block), load.entries);
            load.seek(jobs, load.tile + gridDim.x, tiles);
        }
        if (!job.holds(tile)) {
            if (job.job != ~0u && lane_of() == 0) add_to_job(scratch, job.job, digest, escapes);
            digest = escapes = 0;
            job.seek(jobs, tile);
        }
        const u32 block = tile - job.first_tile;
        const BlockResult result =
            finish_block<ELEMENT_BYTES>(parts, plan, block, job.words(block), scratch, job.job);
        digest += result.mixed;
        escapes += result.escapes;
    }
    if (job.job != ~0u && lane_of() == 0) add_to_job(scratch, job.job, digest, escapes);
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void decode_blocks(const JobTable& table, DecodeShared<ELEMENT_BYTES>& shared,
                                              ReadScratch* scratch) {
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    constexpr u32 OUTPUTS = DECODE_OUTPUTS<ELEMENT_BYTES>;
    const Place<false> place;
    const u32 lane = place.lane(), warp = place.warp(), tiles = table.tiles;
    const FrameJob* jobs = table.all();
    JobTiles job;
    u64 out = 0;
    u32 output = 0;
    StageCursor<DECODE_STAGES> cursor;
    Codes codes(0);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, cursor.advance()) {
        if (!job.holds(tile)) {
            job.seek(jobs, tile);
            codes = Codes(codebook_of_frame(jobs[job.job].frame));
            out = jobs[job.job].words;
        }
        const u32 block = tile - job.first_tile, m = job.words(block);
        u8* elements = shared.elements[output];
        output = OUTPUTS == 2 ? output ^ 1 : 0;
        wait_barrier(&shared.stages.loaded[cursor.stage], cursor.parity);
        rebuild_words<ELEMENT_BYTES, OUTPUTS - 1, true>(shared, place, elements, cursor.stage, block, m, codes,
                                                  cursor.parity, scratch, job.job);
        u64 sum = 0;
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
#pragma unroll
            for (u32 q = 0; q < ELEMENT_BYTES / 2; ++q)
                sum += weighted(*(const uint4*)(elements + place.chunk[slot] * ELEMENT_BYTES + q * 16),
                                weights_of<ELEMENT_BYTES>(place.thread, slot, q));
        shared.stages.put_sum(cursor.stage, sum);
        shared.stages.leave(cursor.stage);

        publish_to_stores();
        const u32 first = warp * WARP_WORDS;
        const u32 mine = m <= first ? 0 : m - first < WARP_WORDS ? m - first : WARP_WORDS;
        const u8* from = elements + first * ELEMENT_BYTES;
        const u64 to = out + u64(block) * (BLOCK_WORDS * ELEMENT_BYTES) + first * ELEMENT_BYTES;
        if (to % 16 == 0 && mine * ELEMENT_BYTES % 16 == 0) {
            store_piece(to, from, mine * ELEMENT_BYTES);
        } else {
#pragma unroll 1
            for (u32 i = lane; i < mine; i += 32) ((Element*)to)[i] = ((const Element*)from)[i];
        }
        commit_stores();
    }
    wait_stores_read();
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void decode_tiles(const JobTable& table, ReadScratch* scratch, Verdict* verdicts) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    auto& shared = *reinterpret_cast<DecodeShared<ELEMENT_BYTES>*>(shared_bytes);
    shared.init();
    if (warp_of() == WARPS)
        feed_decoders<ELEMENT_BYTES>(table, shared, scratch);
    else
        decode_blocks<ELEMENT_BYTES>(table, shared, scratch);
    finish_reading<ELEMENT_BYTES>(table.all(), table.jobs, scratch, verdicts, &shared.last);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_DECODE_BLOCKS_2)
    decode_bfloat16_kernel(const __grid_constant__ JobTable table, ReadScratch* scratch, Verdict* verdicts) {
    decode_tiles<2>(table, scratch, verdicts);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ZIPCCL_DECODE_BLOCKS_4)
    decode_float32_kernel(const __grid_constant__ JobTable table, ReadScratch* scratch, Verdict* verdicts) {
    decode_tiles<4>(table, scratch, verdicts);
}
extern "C" __constant__ u32 decode_shared_bytes[2] = {sizeof(DecodeShared<2>), sizeof(DecodeShared<4>)};
