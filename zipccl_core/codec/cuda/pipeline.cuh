// Moving data between device memory and shared memory while warps compute; no barrier among the warps of a block.
//
// A tile lies in a stage. One warp of the block loads tiles into stages, WARPS others work on an eighth of each: they wait
// on `loaded`, and every thread says on `empty` that it is done. They store their eighth themselves. From compute capability 9.0 on
// loads and stores are bulk copies; below, cp.async and plain stores. Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "layout.cuh"
#include "planes.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ZIPCCL_BULK 1
#else
#define ZIPCCL_BULK 0
#endif

__device__ __forceinline__ u32 lane_of() { return threadIdx.x & 31; }
__device__ __forceinline__ u32 warp_of() { return threadIdx.x >> 5; }
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// --- mbarriers: every thread arrives for itself, as racecheck wants it ---

__device__ __forceinline__ void init_barrier(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After all init_barrier() calls of the initialising thread, before the block's first barrier.
__device__ __forceinline__ void publish_barriers() {
#if ZIPCCL_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}
// Until the phase of this parity is over; all lanes.
__device__ __forceinline__ void wait_barrier(u64* barrier, u32 parity) {
    u32 done = 0;
    while (!done)
#if ZIPCCL_BULK
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
#else
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
#endif
}

// --- loads into a stage, by one warp: begin_load, load_piece ..., end_load ---

constexpr u32 LOAD_ARRIVALS = ZIPCCL_BULK ? 32 : 64;  // what a barrier of loads is initialised with

// What the warp wrote to shared memory before is visible to whoever has waited for the barrier.
__device__ __forceinline__ void begin_load(u64* barrier, u32 n_bytes) {
    __syncwarp();
#if ZIPCCL_BULK
    if (lane_of() == 0) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the working warps' reads of the stage came before
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                     "r"(n_bytes)
                     : "memory");
    } else {
        arrive(barrier);
    }
#else
    arrive(barrier);
#endif
}
__device__ __forceinline__ void load_piece(u64* barrier, void* to, u64 from, u32 n_bytes) {
#if ZIPCCL_BULK
    if (lane_of() == 0 && n_bytes)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
                     : "memory");
#else
    for (u32 i = lane_of() * 16; i < n_bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address((u8*)to + i)), "l"(from + i)
                     : "memory");
#endif
}
__device__ __forceinline__ void end_load(u64* barrier) {
#if !ZIPCCL_BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// --- stores from a warp's own shared memory ---

// The warp's writes so far, stored; all lanes. Any number of calls, then commit_stores().
__device__ __forceinline__ void publish_to_stores() {
#if ZIPCCL_BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncwarp();
}
__device__ __forceinline__ void store_piece(u64 to, const void* from, u32 n_bytes) {
#if ZIPCCL_BULK
    if (lane_of() == 0 && n_bytes)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                     "r"(n_bytes)
                     : "memory");
#else
    for (u32 i = lane_of() * 16; i < n_bytes; i += 512) *(uint4*)(to + i) = *(const uint4*)((const u8*)from + i);
#endif
}
__device__ __forceinline__ void commit_stores() {
#if ZIPCCL_BULK
    if (lane_of() == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until the shared memory of this warp's stores, but for those of the last `pending` commits, may be written again.
template <u32 pending = 0>
__device__ __forceinline__ void wait_stores_read() {
#if ZIPCCL_BULK
    if (lane_of() == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#endif
    __syncwarp();
}

// --- stages ---

// What the warps of a block share to pass STAGES tiles around. Digest sums are passed on a lane at a time, or, where there
// is no shared memory left for that, a warp at a time.
template <u32 STAGES, bool LANE_SUMS>
struct Stages {
    u64 loaded[STAGES], empty[STAGES];  // mbarriers
    u64 sums[STAGES][LANE_SUMS ? THREADS : WARPS];
    u32 counts[STAGES][WARPS];  // escapes

    // By one thread, before a block barrier.
    __device__ __forceinline__ void init() {
        for (u32 s = 0; s < STAGES; ++s) {
            init_barrier(&loaded[s], LOAD_ARRIVALS);
            init_barrier(&empty[s], THREADS);
        }
    }
    // By all lanes of a working warp, after its last access to stage s, sums and counts included.
    __device__ __forceinline__ void leave(u32 s) { arrive(&empty[s]); }
    // By all lanes of a working warp.
    __device__ __forceinline__ void put_sum(u32 s, u64 sum) {
        if (LANE_SUMS) {
            sums[s][threadIdx.x] = sum;
        } else {
            sum = warp_sum_all(sum);
            if (lane_of() == 0) sums[s][warp_of()] = sum;
        }
    }
    // By all lanes of the loading warp, once `empty` has been waited for: this lane's share of the digest sum.
    __device__ __forceinline__ u64 part_of_sum(u32 s) const {
        if (!LANE_SUMS) return lane_of() < WARPS ? sums[s][lane_of()] : 0;
        u64 sum = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) sum += sums[s][(w * 32 + lane_of()) % (LANE_SUMS ? THREADS : WARPS)];
        return sum;
    }
};

// A place in a round of stages, and how often it has come round, modulo 2: the parity to wait for.
template <u32 STAGES>
struct StageCursor {
    u32 stage, parity;
    __device__ __forceinline__ StageCursor() : stage(0), parity(0) {}
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
