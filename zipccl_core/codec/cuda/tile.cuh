// Moving tiles between device memory and shared memory while threads compute.
//
// From compute capability 9.0 on, bulk copies: one thread starts them, loads complete on an mbarrier, stores are waited
// for before their shared memory is written again. Below, cp.async by all threads, and plain 16-byte stores.
// Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "layout.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ZIPCCL_BULK 1
#else
#define ZIPCCL_BULK 0
#endif

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Loads of one stage. Every thread of the block calls every function; `elected` is true in exactly one of them.
struct StageLoads {
    u64* barrier;  // in shared memory, one a stage; used with bulk copies only

    __device__ __forceinline__ void init(bool elected) {
#if ZIPCCL_BULK
        if (elected) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
#endif
    }

    // Announce how many bytes the following load() calls bring; before them.
    __device__ __forceinline__ void expect(u32 n_bytes, bool elected) {
#if ZIPCCL_BULK
        if (elected)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                         "r"(n_bytes)
                         : "memory");
#endif
    }

    __device__ __forceinline__ void load(void* to, const void* from, u32 n_bytes, bool elected) {
#if ZIPCCL_BULK
        if (elected && n_bytes)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    shared_address(to)),
                "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
                : "memory");
#else
        for (u32 i = threadIdx.x * 16; i < n_bytes; i += THREADS * 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address((u8*)to + i)),
                         "l"((const u8*)from + i)
                         : "memory");
#endif
    }

    // Close the loads of a stage, also when there were none.
    __device__ __forceinline__ void commit() {
#if !ZIPCCL_BULK
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Wait for the loads of this stage. `expected` says whether expect() was called for them; `phase` is how often
    // before, modulo 2; `younger` stages may have been committed since.
    template <u32 younger>
    __device__ __forceinline__ void wait(bool expected, u32 phase) {
#if ZIPCCL_BULK
        if (!expected) return;
        u32 done = 0;
        while (!done)
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(shared_address(barrier)), "r"(phase)
                : "memory");
#else
        asm volatile("cp.async.wait_group %0;" ::"n"(younger) : "memory");
        __syncthreads();
#endif
    }
};

// Make the threads' ordinary writes to shared memory visible to the stores below; by each writer, before a barrier.
__device__ __forceinline__ void publish_shared() {
#if ZIPCCL_BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Store from shared memory; every thread calls, after a barrier.
__device__ __forceinline__ void store_tile(void* to, const void* from, u32 n_bytes, bool elected) {
#if ZIPCCL_BULK
    if (elected && n_bytes)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                     "r"(n_bytes)
                     : "memory");
#else
    for (u32 i = threadIdx.x * 16; i < n_bytes; i += THREADS * 16)
        *(uint4*)((u8*)to + i) = *(const uint4*)((const u8*)from + i);
#endif
}
__device__ __forceinline__ void commit_stores(bool elected) {
#if ZIPCCL_BULK
    if (elected) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until the shared memory of all stores so far may be written again; a barrier must follow.
__device__ __forceinline__ void wait_stores_read(bool elected) {
#if ZIPCCL_BULK
    if (elected) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
