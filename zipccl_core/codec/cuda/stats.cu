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

// FORMAT.md 7.4, by one warp. `key` of an exponent orders by count, then by smaller exponent.
__device__ __forceinline__ u64 fitted_exponents(const u32* count) {
    const u32 lane = threadIdx.x & 31;
    u32 key[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        u32 e = i * 32 + lane;
        key[i] = e == 255 ? 0 : (count[e] << 8 | (255 - e));
    }
    u64 low = 0, mid_low = 0, mid_high = 0, high = 0;  // the chosen, as a set of 256 bits
#pragma unroll 1
    for (u32 round = 0; round < 7; ++round) {
        u32 best = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) best = key[i] > best ? key[i] : best;
        best = __reduce_max_sync(~0u, best);
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            if (key[i] == best) key[i] = 0;
        u32 e = 255 - (best & 255);
        u64 bit = 1ull << (e & 63);
        if (e < 64) low |= bit;
        else if (e < 128) mid_low |= bit;
        else if (e < 192) mid_high |= bit;
        else high |= bit;
    }
    u64 exponents = 0;
    for (u32 i = 0; i < 7; ++i) {
        u64 e;
        if (low) e = __ffsll(low) - 1, low &= low - 1;
        else if (mid_low) e = 63 + __ffsll(mid_low), mid_low &= mid_low - 1;
        else if (mid_high) e = 127 + __ffsll(mid_high), mid_high &= mid_high - 1;
        else e = 191 + __ffsll(high), high &= high - 1;
        exponents |= e << (8 * i);
    }
    return exponents;
}

// FORMAT.md 7.5, by one warp; the same in all lanes.
__device__ __forceinline__ u64 gaussian_exponents(const u32* count, double* sigma) {
    const u32 lane = threadIdx.x & 31;
    u32 words = 0, top = 0;
    for (u32 e = lane; e < 255; e += 32)
        if (e && count[e]) words += count[e], top = e;
    const u64 n = __reduce_add_sync(~0u, words);
    top = __reduce_max_sync(~0u, top);
    *sigma = 0;
    if (!n) return run_from(0);
    // a lane an exponent, then a lane a power of 4: all sums and products fit 64 bits (a histogram has under 2^17 words)
    u64 s = lane <= HISTOGRAM_DEPTH && lane < top ? u64(count[top - lane]) << (2 * (HISTOGRAM_DEPTH - lane)) : 0;
    for (u32 d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
    const u32 j = 31 - __clz(__ballot_sync(~0u, lane < 20 && ((3 * n) << (2 * lane)) <= 7 * s));
    bool upper = 7 * s * 1024 >= ((ZIPCCL_UPPER_RUN_FROM_SQUARED_1024 * 3ull * n) << (2 * j));
    // 7 s / (3 n) is the mean square if words are spread evenly over an octave; those of a Gaussian are not (7.5)
    double square = 7.0 * double(s) * 2767.0 / (3.0 * double(n) * ZIPCCL_UPPER_RUN_FROM_SQUARED_1024);
    *sigma = scalbn(sqrt(square), int(top) - 127 - int(HISTOGRAM_DEPTH));
    return run_from((long long)top - 142 + j + 122 + upper);
}

template <u32 ELEMENT_BYTES>
__device__ __forceinline__ void count_sample(const JobTable& table, Counters* counters, Statistics* answers) {
    typedef typename UnsignedOf<ELEMENT_BYTES>::type Element;
    __shared__ u32 counts[COPIES][EXPONENTS];
    __shared__ u32 last;
    const FrameJob& job = table.all()[blockIdx.y];
    const u32 t = threadIdx.x;
    for (u32 i = t; i < COPIES * EXPONENTS; i += STATS_THREADS) (&counts[0][0])[i] = 0;
    __syncthreads();

    const u64 n = job.n, stride = (n >> SAMPLE_LOG2_WORDS) | 1;
    const u64 sampled = (n + stride - 1) / stride;
    const Element* words = (const Element*)job.words;
    u32* mine = counts[(t >> 5) % COPIES];
    const u64 step = u64(gridDim.x) * STATS_THREADS;
    for (u64 i = u64(blockIdx.x) * STATS_THREADS + t; i < sampled; i += 4 * step) {
        Element x[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
            if (i + k * step < sampled) x[k] = __ldg(words + (i + k * step) * stride);
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
            if (i + k * step < sampled) atomicAdd(&mine[(ELEMENT_BYTES == 2 ? x[k] >> 7 : x[k] >> 23) & 0xff], 1u);
    }
    __syncthreads();
    Counters& total = counters[blockIdx.y];
    if (t < EXPONENTS) {
        u32 c = 0;
#pragma unroll
        for (u32 k = 0; k < COPIES; ++k) c += counts[k][t];
        if (c) atomicAdd(&total.count[t], c);
    }
    __threadfence();
    __syncthreads();
    if (t == 0) last = atomicAdd(&total.finished_blocks, 1u) + 1 == gridDim.x;
    __syncthreads();
    if (!last) return;

    __threadfence();
    Statistics& answer = answers[blockIdx.y];
    if (t < EXPONENTS) {
        u32 c = ((volatile u32*)total.count)[t];
        counts[0][t] = c;
        answer.histogram[t] = c;
        total.count[t] = 0;
    }
    if (t == 0) total.finished_blocks = 0;
    __syncthreads();
    if (t < 32) {
        u64 fitted = fitted_exponents(counts[0]);
        if (t == 0) answer.fitted = fitted;
    } else if (t < 64) {
        double sigma;
        u64 gaussian = gaussian_exponents(counts[0], &sigma);
        if (t == 32) answer.gaussian = gaussian, answer.sigma = sigma, answer.sampled = sampled;
        if (t >= 60) answer.reserved[t - 60] = 0;
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
