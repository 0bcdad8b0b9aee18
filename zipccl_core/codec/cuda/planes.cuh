// Bits of 32 consecutive words in one thread: words to planes and back, without a table and without shared memory.
//
// A thread's 32 words are four chunks of 8 (16 bytes). It reads and writes them in rotated order, chunk
// (slot + rotation) mod 4 at step `slot`, because at a distance of 64 bytes the same chunk of all lanes would lie in the
// same banks. Words in "slot order" are rotated so; a 32-bit piece of a plane has one byte a chunk, and turning it by
// 8 * rotation bits changes between slot order and memory order.
#pragma once
#include "layout.cuh"

// Conflict-free for 16-byte accesses 64 bytes apart and for 8-byte accesses 32 bytes apart.
__device__ __forceinline__ u32 slot_rotation() { return ((threadIdx.x >> 1) ^ (threadIdx.x >> 3)) & 3; }

// Where a thread's chunks are, in words from the beginning of a tile. PINNED: in registers, where there are enough.
template <bool PINNED>
struct Place {
    u32 thread, rotation, chunk[4];

    __device__ __forceinline__ Place() {
        thread = threadIdx.x;
        rotation = slot_rotation();
#pragma unroll
        for (u32 slot = 0; slot < 4; ++slot)
            chunk[slot] = thread * THREAD_WORDS + ((slot + rotation) & 3) * 8;
        if (PINNED) {  // or they are computed anew in every tile
            asm volatile("" : "+r"(thread), "+r"(rotation));
            asm volatile("" : "+r"(chunk[0]), "+r"(chunk[1]), "+r"(chunk[2]), "+r"(chunk[3]));
        }
    }
    __device__ __forceinline__ u32 lane() const { return thread & 31; }
    __device__ __forceinline__ u32 warp() const { return thread >> 5; }
};

// Bits of a where mask is 1, of b where it is 0.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 r;  // left to itself the compiler makes two instructions of it
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 selector) {
    u32 r;  // not __byte_perm, which masks a selector known only at run time
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// Exchange the bit of the register index that tells a from b with the bit of the bit index of weight `distance`.
template <u32 distance, u32 mask>
__device__ __forceinline__ void exchange_index_bit(u32& a, u32& b) {
    u32 first = select_bits(mask, b << distance, a);
    b = select_bits(mask, b, a >> distance);
    a = first;
}

// The signs and mantissas of 4 words in two registers, one byte each, in order.
__device__ __forceinline__ u32 sign_mantissa_of(u32 v0, u32 v1) {
    return select_bits(0x80808080u, bytes_of(v0, v1, 0x7531), bytes_of(v0, v1, 0x6420));
}

// Exponents of two chunks in four registers, a byte each: chunk v0 in the even bytes, v1 in the odd ones.
__device__ __forceinline__ void merge_exponents(const u32 (&v0)[4], const u32 (&v1)[4], u32* a) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) a[i] = select_bits(0xff00ff00u, v1[i] << 1, v0[i] >> 7);
}

// The 8 bit planes of the exponents of 32 words, from a[pair * 4 + i] of merge_exponents() for slots 2 pair, 2 pair + 1.
//
// Exchanging three bits of the register index with the three bits of the index within a byte leaves one plane a
// register. Bit order within a plane, from the highest bit of the index: word & 1, slot & 1, word >> 2, word >> 1 & 1,
// slot >> 1; in_slot_order() sets it right, for the planes that remain.
__device__ __forceinline__ void exponent_planes(u32 (&a)[8], u32 (&plane)[8]) {
#pragma unroll
    for (u32 r = 0; r < 8; ++r)
        if (!(r & 2)) exchange_index_bit<4, 0xf0f0f0f0u>(a[r], a[r | 2]);
#pragma unroll
    for (u32 r = 0; r < 8; ++r)
        if (!(r & 1)) exchange_index_bit<2, 0xccccccccu>(a[r], a[r | 1]);
#pragma unroll
    for (u32 r = 0; r < 4; ++r) exchange_index_bit<1, 0xaaaaaaaau>(a[r], a[r | 4]);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) plane[j] = a[4 * (j & 1) + 2 * (j >> 2) + (j >> 1 & 1)];
}

__device__ __forceinline__ u32 in_slot_order(u32 plane) {
    u32 moved = (plane ^ (plane >> 15)) & 0x0000aaaau;
    return plane ^ moved ^ (moved << 15);
}

// A codebook as the kernels use it.
struct Codes {
    u32 low, high;    // exponent of code c in byte c; byte 0 is 0
    bool contiguous;  // the exponents are a run

    __device__ __forceinline__ explicit Codes(u64 exponents) {
        low = u32(exponents << 8);
        high = u32(exponents >> 24);
        u32 first = u32(exponents & 0xff);
        contiguous = exponents == (0x06050403020100ull + first * 0x01010101010101ull);
    }
    // Whether a byte is one of the 7 exponents.
    __device__ __forceinline__ bool holds(u32 exponent) const {
        u32 all = exponent * 0x01010101u;
        u32 a = bytes_of(low, 0, 0x3211) ^ all, b = high ^ all;
        return (((a - 0x01010101u) & ~a) | ((b - 0x01010101u) & ~b)) & 0x80808080u;
    }
    // Bit 7 of bytes of `four` that are: exact in those up to the first that is.
    __device__ __forceinline__ u32 held_of(u32 four) const {
        u32 held = 0;
#pragma unroll
        for (u32 code = 1; code < 8; ++code) {
            const u32 x = four ^ bytes_of(low, high, 0x1111 * code);
            held |= (x - 0x01010101u) & ~x;
        }
        return held & 0x80808080u;
    }
};

// Code planes of a contiguous codebook: codes are exponent - (first - 1), if that is 1 to 7. A subtraction, bit by bit.
__device__ __forceinline__ void code_planes_of_run(const u32 (&plane)[8], u32 below_first, u32 (&code)[3]) {
    u32 difference[8], borrow = 0;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        u32 s = (below_first >> j & 1) ? ~0u : 0u;
        difference[j] = plane[j] ^ s ^ borrow;
        borrow = (~plane[j] & (s | borrow)) | (s & borrow);
    }
    u32 outside = difference[3] | difference[4] | difference[5] | difference[6] | difference[7];
#pragma unroll
    for (u32 p = 0; p < 3; ++p) code[p] = difference[p] & ~outside;
}

// Code planes of any codebook. unlike[i * 8 + j] is all ones where bit j of exponent i is 0; in shared memory.
__device__ __forceinline__ void code_planes_of_set(const u32 (&plane)[8], const u32* unlike, u32 (&code)[3]) {
    code[0] = code[1] = code[2] = 0;
#pragma unroll
    for (u32 i = 0; i < 7; ++i) {
        uint4 first = *(const uint4*)(unlike + i * 8), second = *(const uint4*)(unlike + i * 8 + 4);
        u32 match = (plane[0] ^ first.x) & (plane[1] ^ first.y);
        match &= plane[2] ^ first.z;
        match &= plane[3] ^ first.w;
        match &= plane[4] ^ second.x;
        match &= plane[5] ^ second.y;
        match &= plane[6] ^ second.z;
        match &= plane[7] ^ second.w;
#pragma unroll
        for (u32 p = 0; p < 3; ++p)
            if ((i + 1) >> p & 1) code[p] |= match;
    }
}

// Nibble n of z[r] becomes the code of word 4n + r, from three planes: the index bits of z and of a bit change places.
__device__ __forceinline__ void code_nibbles(u32 p0, u32 p1, u32 p2, u32 (&z)[4]) {
    z[0] = p0, z[1] = p1, z[2] = p2, z[3] = 0;
    exchange_index_bit<1, 0xaaaaaaaau>(z[0], z[1]);
    exchange_index_bit<1, 0xaaaaaaaau>(z[2], z[3]);
    exchange_index_bit<2, 0xccccccccu>(z[0], z[2]);
    exchange_index_bit<2, 0xccccccccu>(z[1], z[3]);
}

// The 16 words of the lower or the upper 4 nibbles of each z[r] and their signs and mantissas; an ESCAPE gets exponent 0.
//
// Eight exponents fit the two registers that one byte permutation selects from, so it looks up four codes at once.
__device__ __forceinline__ void join_words(const u32 (&z)[4], u32 half, const Codes& codes,
                                           const u32 (&sign_mantissa)[4], u32 (&v)[8]) {
    u32 x[4];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) x[r] = bytes_of(codes.low, codes.high, half ? z[r] >> 16 : z[r]);
    const u32 t0 = bytes_of(x[0], x[1], 0x5140), t1 = bytes_of(x[0], x[1], 0x7362);
    const u32 t2 = bytes_of(x[2], x[3], 0x5140), t3 = bytes_of(x[2], x[3], 0x7362);
    const u32 y[4] = {bytes_of(t0, t2, 0x5410), bytes_of(t0, t2, 0x7632), bytes_of(t1, t3, 0x5410),
                      bytes_of(t1, t3, 0x7632)};
#pragma unroll
    for (u32 q = 0; q < 4; ++q) {
        const u32 s = sign_mantissa[q];
        const u32 upper = select_bits(0x80808080u, s, y[q] >> 1);
        const u32 lower = select_bits(0x80808080u, y[q] << 7, s);
        v[q * 2] = bytes_of(lower, upper, 0x5140);
        v[q * 2 + 1] = bytes_of(lower, upper, 0x7362);
    }
}

// selector[k] has the codes of words 4k to 4k + 3 in its lower 16 bits, a nibble each, as a byte permutation wants them.
__device__ __forceinline__ void code_selectors(u32 p0, u32 p1, u32 p2, u32 (&selector)[8]) {
    u32 z[4];
    code_nibbles(p0, p1, p2, z);
    exchange_index_bit<4, 0xf0f0f0f0u>(z[0], z[1]);  // byte i: the codes of words 8i, 8i + 1; of 8i + 4, 8i + 5
    exchange_index_bit<4, 0xf0f0f0f0u>(z[2], z[3]);  // of words 8i + 2, 8i + 3; of 8i + 6, 8i + 7
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        selector[i * 2] = bytes_of(z[0], z[2], i | (4 + i) << 4);
        selector[i * 2 + 1] = bytes_of(z[1], z[3], i | (4 + i) << 4);
    }
}

// A codebook to join words from: each exponent is turned right by one bit within its byte. Its upper 7 bits then lie where
// the upper byte of a word has them, and the last where the lower byte has it, so that joining takes no shifts.
struct TurnedCodes {
    u32 low, high;  // as in Codes

    __device__ __forceinline__ TurnedCodes(u32 low, u32 high) : low(low), high(high) {}
    __device__ __forceinline__ explicit TurnedCodes(u64 exponents) {
        const Codes codes(exponents);
        low = select_bits(0x80808080u, codes.low << 7, codes.low >> 1);
        high = select_bits(0x80808080u, codes.high << 7, codes.high >> 1);
    }
    // An exponent, turned, in all four bytes.
    static __device__ __forceinline__ u32 turned(u32 exponent) {
        const u32 all = exponent * 0x01010101u;
        return __funnelshift_r(all, all, 1);
    }
    // Whether what turned() returned is of one of the 7 exponents.
    __device__ __forceinline__ bool holds(u32 all) const {
        const u32 a = bytes_of(low, 0, 0x3211) ^ all, b = high ^ all;
        return (((a - 0x01010101u) & ~a) | ((b - 0x01010101u) & ~b)) & 0x80808080u;
    }
    // The exponents, turned, of four words; 0 for an ESCAPE.
    __device__ __forceinline__ u32 look_up(u32 selector) const { return bytes_of(low, high, selector); }
};

// Four words from their exponents, turned, and their signs and mantissas.
__device__ __forceinline__ uint2 join_turned(u32 turned, u32 sign_mantissa) {
    const u32 upper = select_bits(0x80808080u, sign_mantissa, turned);
    const u32 lower = select_bits(0x80808080u, turned, sign_mantissa);
    return make_uint2(bytes_of(lower, upper, 0x5140), bytes_of(lower, upper, 0x7362));
}

// With more escapes than this among a warp's words, its lanes pass over all of theirs: finding them one by one, a warp
// waits for the lane with the most.
constexpr u32 FEW_ESCAPES = 64;

// Bit i is 1 if word i of this thread's 32 exists in a block of m words.
__device__ __forceinline__ u32 valid_words(u32 thread, u32 m) {
    int left = int(m) - int(thread * THREAD_WORDS);
    return left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
}

__device__ __forceinline__ u32 warp_inclusive_sum(u32 x) {
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        u32 y = __shfl_up_sync(~0u, x, d);
        if ((threadIdx.x & 31) >= d) x += y;
    }
    return x;
}

// The same, in two instructions a step: a shuffle also says whether there was a lane to take from.
__device__ __forceinline__ u32 warp_prefix_sum(u32 x) {
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2)
        asm volatile("{\n.reg .pred p;\n.reg .b32 y;\nshfl.sync.up.b32 y|p, %0, %1, 0, 0xffffffff;\n"
                     "@p add.u32 %0, %0, y;\n}"
                     : "+r"(x)
                     : "r"(d));
    return x;
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (u32 d = 16; d; d /= 2) x += __shfl_down_sync(~0u, x, d);
    return x;
}

// Sum of u64 over a warp, wrapping; in every lane. Three 32-bit reductions, of 16, 16 and 32 bits.
__device__ __forceinline__ u64 warp_sum_all(u64 x) {
    u32 a = __reduce_add_sync(~0u, u32(x) & 0xffff);
    u32 b = __reduce_add_sync(~0u, u32(x) >> 16);
    u32 c = __reduce_add_sync(~0u, u32(x >> 32));
    return u64(a) + (u64(b) << 16) + (u64(c) << 32);
}

// Four units of a digest sum.
__device__ __forceinline__ u64 weighted(uint4 x, uint4 w) {
    u64 sum = u64(x.x) * w.x;
    sum += u64(x.y) * w.y;
    sum += u64(x.z) * w.z;
    sum += u64(x.w) * w.w;
    return sum;
}

// Digest weights of every thread's units, in slot order, four at a time: lanes side by side, so that a load of a warp is
// 512 bytes in a row. A weight takes eight instructions to compute; this table stays in the first-level cache.
template <u32 ELEMENT_BYTES>
struct WeightTable {
    static constexpr u32 QUADS = 2 * ELEMENT_BYTES;  // of units, a thread
    u32 weight[QUADS][THREADS][4];

    __host__ __device__ constexpr WeightTable() : weight() {  // NVRTC takes no function of the host alone
        for (u32 q = 0; q < QUADS; ++q)
            for (u32 t = 0; t < THREADS; ++t)
                for (u32 i = 0; i < 4; ++i) {
                    const u32 chunk = (q / (QUADS / 4) + (((t >> 1) ^ (t >> 3)) & 3)) & 3;
                    weight[q][t][i] = digest_weight(t * (QUADS * 4) + chunk * QUADS + q % (QUADS / 4) * 4 + i);
                }
    }
};
alignas(16) __device__ const WeightTable<2> weights_of_bfloat16;
alignas(16) __device__ const WeightTable<4> weights_of_float32;

// Of quad `quad` of slot `slot` of this thread.
template <u32 ELEMENT_BYTES>
__device__ __forceinline__ uint4 weights_of(u32 thread, u32 slot, u32 quad) {
    const u32 q = slot * (ELEMENT_BYTES / 2) + quad % (ELEMENT_BYTES / 2);
    return __ldg((const uint4*)(ELEMENT_BYTES == 2 ? weights_of_bfloat16.weight[q % 4][thread]
                                                   : weights_of_float32.weight[q][thread]));
}
