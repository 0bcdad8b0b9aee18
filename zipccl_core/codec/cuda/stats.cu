// Statistics of words that stay on the device: the histogram of a fixed sample, and the codebooks that follow from it.
//
// Integers only (FORMAT.md 7.3-7.5), so that the codebook, and with it every byte of a frame, is the same in every run.
// One launch: many thread blocks count; the last one of each job to end works out the codebooks.
#include "layout.cuh"

constexpr u32 STATS_THREADS = 512;
constexpr u32 COPIES = 8;  // histograms a thread block, lest all lanes add to the same few counters
constexpr u32 EXPONENTS = 256;
constexpr u32 LAST_RUN_START = 248;

// Of one job, in scratch: zero before and after every launch.
struct Counters {
    u32 count[EXPONENTS];
    u32 finished_blocks, reserved[15];
};
static_assert(sizeof(Counters) == ZIPCCL_COUNTERS_BYTES, "stats.py allocates this");

// What a job answers.
struct Statistics {
    u64 fitted;    // 7 exponents, ascending, from the lowest byte (FORMAT.md 7.4)
    u64 gaussian;  // the same (7.5)
    double sigma;  // standard deviation of the Gaussian that has this mean square by 7.5; 0 if there is nothing to measure
    u64 sampled;   // words in the histogram
    u64 reserved[4];
    u64 histogram[EXPONENTS];
};
static_assert(sizeof(Statistics) == ZIPCCL_STATISTICS_BYTES, "stats.py reads this");

__device__ __forceinline__ u64 run_from(long long start) {
    start = start < 0 ? 0 : start > LAST_RUN_START ? LAST_RUN_START : start;
    return 0x06050403020100ull + u64(start) * 0x01010101010101ull;
}

// FORMAT.md 7.4, by one warp; the same in all lanes. `key` of an exponent orders by count, then by smaller exponent.
__device__ __forceinline__ u64 fitted_exponents(const u32* count) {
    const u32 lane = threadIdx.x & 31;
    u32 key[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 e = i * 32 + lane;
        key[i] = e == 255 ? 0 : (count[e] << 8 | (255 - e));
    }
    // a lane's keys in falling order: the largest of all is then the first of a lane, which gives it up
#pragma unroll
    for (u32 round = 0; round < 8; ++round)
#pragma unroll
        for (u32 i = round & 1; i + 1 < 8; i += 2) {
            const u32 larger = key[i] > key[i + 1] ? key[i] : key[i + 1];
            key[i + 1] = key[i] > key[i + 1] ? key[i + 1] : key[i];
            key[i] = larger;
        }
    u32 chosen = 0;  // in lane `round`
#pragma unroll
    for (u32 round = 0; round < 7; ++round) {
        const u32 best = __reduce_max_sync(~0u, key[0]);
        if (lane == round) chosen = 255 - (best & 255);
        const bool given = key[0] == best;
#pragma unroll
        for (u32 i = 0; i < 7; ++i) key[i] = given ? key[i + 1] : key[i];
    }
    u32 smaller = 0;
#pragma unroll
    for (u32 i = 0; i < 7; ++i) smaller += __shfl_sync(~0u, chosen, i) < chosen;
    const u64 exponents = lane < 7 ? u64(chosen) << (8 * smaller) : 0;
    return u64(__reduce_or_sync(~0u, u32(exponents >> 32))) << 32 | __reduce_or_sync(~0u, u32(exponents));
}

// What FORMAT.md 7.5 takes from a histogram: N, S and E.
struct Moments {
    u64 n, s;
    u32 top;
};

// By one warp; the same in all lanes.
__device__ __forceinline__ Moments moments_of(const u32* count) {
    const u32 lane = threadIdx.x & 31;
    u32 words = 0, top = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 e = i * 32 + lane, c = e && e < 255 ? count[e] : 0;
        words += c;
        if (c) top = e;
    }
    const u64 n = __reduce_add_sync(~0u, words);
    top = __reduce_max_sync(~0u, top);
    // a lane an exponent: all sums and products fit 64 bits, S fits 47 (a histogram has under 2^17 words)
    const u64 s = lane <= HISTOGRAM_DEPTH && lane < top ? u64(count[top - lane]) << (2 * (HISTOGRAM_DEPTH - lane)) : 0;
    const u64 upper = __reduce_add_sync(~0u, u32(s >> 24));
    return {n, (upper << 24) + __reduce_add_sync(~0u, u32(s) & 0xffffff), top};
}

// FORMAT.md 7.5, by one warp; the same in all lanes.
__device__ __forceinline__ u64 gaussian_exponents(const Moments& of) {
    if (!of.n) return run_from(0);
    const u32 lane = threadIdx.x & 31;  // a lane a power of 4
    const u32 j = 31 - __clz(__ballot_sync(~0u, lane < 20 && ((3 * of.n) << (2 * lane)) <= 7 * of.s));
    const bool upper = 7 * of.s * 1024 >= ((ZIPCCL_UPPER_RUN_FROM_SQUARED_1024 * 3ull * of.n) << (2 * j));
    return run_from((long long)of.top - 142 + j + 122 + upper);
}

__device__ __forceinline__ double sigma_of(const Moments& of) {
    if (!of.n) return 0;
    // 7 s / (3 n) is the mean square if words are spread evenly over an octave; those of a Gaussian are not (7.5)
    const double square = 7.0 * double(of.s) * 2767.0 / (3.0 * double(of.n) * ZIPCCL_UPPER_RUN_FROM_SQUARED_1024);
    return scalbn(sqrt(square), int(of.top) - 127 - int(HISTOGRAM_DEPTH));
}

// By one thread: a thread block is done, and how many were before it. What all its threads did before a barrier is seen
// by those of whoever finds itself to be the last.
__device__ __forceinline__ u32 count_finished(u32* finished_blocks) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(finished_blocks) : "memory");
    return before;
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void count_sample(const JobTable& table, Counters* counters, Statistics* answers) {
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    __shared__ __align__(16) u32 counts[COPIES][EXPONENTS];
    __shared__ bool last;
    static_assert(COPIES * EXPONENTS == STATS_THREADS * 4, "a thread clears four");
    const u32 t = threadIdx.x;
    u64 n = table.inline_jobs[blockIdx.y % INLINE_JOBS].n, address = table.inline_jobs[blockIdx.y % INLINE_JOBS].words;
    if (table.address) {
        const FrameJob& job = reinterpret_cast<const FrameJob*>(table.address)[blockIdx.y];
        n = job.n, address = job.words;
    }

    // A thread has one word of the sample, or one in every `step`; it is on its way while counts are cleared, and no
    // __ldg, which the compiler would move behind that.
    const u64 stride = (n >> SAMPLE_LOG2_WORDS) | 1, step = u64(gridDim.x) * STATS_THREADS * stride;
    const Element* words = (const Element*)address;
    u64 i = (u64(blockIdx.x) * STATS_THREADS + t) * stride;
    Element x = i < n ? words[i] : 0;
    ((uint4*)counts)[t] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    while (i < n) {
        atomicAdd(&counts[(t >> 5) % COPIES][(ELEMENT_BYTES == 2 ? x >> 7 : x >> 23) & 0xff], 1u);
        i += step;
        if (i < n) x = words[i];
    }
    __syncthreads();
    Counters& total = counters[blockIdx.y];
    if (t < EXPONENTS) {
        u32 c = 0;
#pragma unroll
        for (u32 k = 0; k < COPIES; ++k) c += counts[k][t];
        if (c) atomicAdd(&total.count[t], c);
    }
    __syncthreads();
    if (t == 0) last = count_finished(&total.finished_blocks) + 1 == gridDim.x;
    __syncthreads();
    if (!last) return;

    Statistics& answer = answers[blockIdx.y];
    if (t < EXPONENTS) {
        u32 c = ((volatile u32*)total.count)[t];
        counts[0][t] = c;
        answer.histogram[t] = c;
        total.count[t] = 0;
    }
    if (t == 0) total.finished_blocks = 0;
    __syncthreads();
    // a warp an answer
    if (t < 32) {
        const u64 fitted = fitted_exponents(counts[0]);
        if (t == 0) answer.fitted = fitted;
    } else if (t < 64) {
        const u64 gaussian = gaussian_exponents(moments_of(counts[0]));
        if (t == 32) answer.gaussian = gaussian;
    } else if (t < 96) {
        const double sigma = sigma_of(moments_of(counts[0]));
        if (t == 64) answer.sigma = sigma;
    } else if (t < 128) {
        u32 sampled = 0;
#pragma unroll
        for (u32 k = 0; k < EXPONENTS; k += 32) sampled += counts[0][k + t - 96];
        sampled = __reduce_add_sync(~0u, sampled);
        if (t == 96) answer.sampled = sampled;
        if (t >= 124) answer.reserved[t - 124] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(STATS_THREADS)
    count_exponents_bfloat16_kernel(const __grid_constant__ JobTable table, Counters* counters, Statistics* answers) {
    count_sample<2>(table, counters, answers);
}
extern "C" __global__ void __launch_bounds__(STATS_THREADS)
    count_exponents_float32_kernel(const __grid_constant__ JobTable table, Counters* counters, Statistics* answers) {
    count_sample<4>(table, counters, answers);
}
