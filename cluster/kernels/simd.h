// Sixteen-lane vectors in the compiler's portable vector extension, and what attention and
// matrix products need of them. Knows lanes; refuses to know models.
//
// Everything here is a fixed sequence of operations: a result depends on the operands alone, never
// on how many rows are computed beside them. Row-independence of the kernels rests on that.
#pragma once

#include <cstdint>
#include <cstring>

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16w __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

static inline v16 load(const float *p) {
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline v16 load(const bf16 *p) {
    v16h h;
    memcpy(&h, p, sizeof h);
    return (v16)(__builtin_convertvector(h, v16w) << 16);
}

// IEEE half precision, without infinities: the exponent is moved by multiplying, which also rights subnormals.
static inline v16 load_half(const uint16_t *p) {
    v16h h;
    memcpy(&h, p, sizeof h);
    v16w w = __builtin_convertvector(h, v16w);
    v16 magnitude = (v16)((w & 0x7fff) << 13) * 5.192296858534828e33f; // 2^112
    return (v16)((v16w)magnitude | (w & 0x8000) << 16);
}

static inline void store(float *p, v16 x) { memcpy(p, &x, sizeof x); }

// Round to nearest even, as torch does.
static inline void store(bf16 *p, v16 x) {
    v16w w = (v16w)x;
    v16h h = __builtin_convertvector((w + 0x7fff + ((w >> 16) & 1)) >> 16, v16h);
    memcpy(p, &h, sizeof h);
}

static inline float widen(float x) { return x; }

static inline float widen(bf16 x) {
    uint32_t w = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &w, sizeof f);
    return f;
}

static inline void narrow(float *p, float x) { *p = x; }

static inline void narrow(bf16 *p, float x) {
    uint32_t w;
    memcpy(&w, &x, sizeof w);
    p->bits = (uint16_t)((w + 0x7fff + ((w >> 16) & 1)) >> 16);
}

static inline v16 splat(float x) { return x - (v16){}; }

static inline v16i iota() { return (v16i){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

static inline v16 vmax(v16 a, v16 b) { return a > b ? a : b; }

static inline float sum(v16 x) {
    float a[16];
    memcpy(a, &x, sizeof a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a[i] += a[i + half];
    return a[0];
}

static inline float max(v16 x) {
    float a[16];
    memcpy(a, &x, sizeof a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
}

// exp(x) to about two units in the last place; 0 below -87, so exp(-inf) is 0.
static inline v16 vexp(v16 x) {
    const v16 top = splat(88.0f);
    v16i tiny = x < -87.0f;
    x = x < top ? x : top;
    v16 n = x * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 rounds to an integer
    v16i shift = (v16i)n << 23;
    n -= 12582912.0f;
    v16 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    v16 y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y = (v16)((v16i)y + shift);
    return tiny ? splat(0.0f) : y;
}

static inline float vexp1(float x) { return vexp(splat(x))[0]; }

static inline v16 vtanh(v16 x) {
    v16 e = vexp((x < 40.0f ? x : splat(40.0f)) * 2.0f);
    return 1.0f - 2.0f / (e + 1.0f);
}

static inline v16 vsilu(v16 x) { return x / (1.0f + vexp(-x)); }

// Transpose a 16 x 16 matrix of 32-bit words held in r[0..15], in place: four rounds of pairwise
// interleaving (a perfect shuffle applied four times is the transposition).
static inline void transpose(v16w *r) {
    const v16w low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const v16w high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    v16w t[16];
    for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 8; ++i) {
            t[2 * i] = __builtin_shuffle(r[i], r[i + 8], low);
            t[2 * i + 1] = __builtin_shuffle(r[i], r[i + 8], high);
        }
        for (int i = 0; i < 16; ++i) r[i] = t[i];
    }
}
