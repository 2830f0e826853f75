// C = A W^T with W packed once, accumulated in float32, for few rows (decoding) and many (prompts).
//
// Knows: the packed layout and the three ways to multiply (AMX tiles, AVX-512 BF16, portable
// vectors). Refuses to know: what the product means; the caller's `emit` gets each finished strip.
//
// Packed layout: panels of 32 output columns, K padded to a multiple of 32 with zeros.
//     float   [panel][k][32]
//     bf16    [panel][2 halves of 16 columns][k / 2][16][2]    one half x 32 k = one AMX tile
// A is [rows][depth] with `depth` the padded K; for AMX its buffer has rows up to a multiple of 16.
#pragma once

#include "levels.h"
#include "simd.h"
#include "team.h"

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const int TALLEST = 12; // rows whose float sums fit in registers, two vectors each
static const int DEEPEST = 96; // k of one run of float weights: this one and the next fit in 48 KiB beside A

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#ifdef __AMX_BF16__
// Linux grants the tile registers on request, once a process.
static inline bool tiles_granted() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

// For each thread, before its first product and after its last.
static inline void tiles_configure() {
    if (!tiles_granted()) return;
    TileShapes shapes;
    shapes.set(0, 8, 16, 64);
    shapes.load();
}

static inline void tiles_release() {
    if (tiles_granted()) _tile_release();
}

template <int TILES> static inline void tiles_product(const bf16 *a, int64_t depth, const bf16 *w, float *c) {
    const bf16 *w1 = w + depth * 16, *a1 = a + 16 * depth;
    _tile_zero(0);
    _tile_zero(1);
    if (TILES > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32) {
        _tile_loadd(6, w + k * 16, 64);
        _tile_loadd(7, w1 + k * 16, 64);
        _tile_loadd(4, a + k, depth * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TILES > 1) {
            _tile_loadd(5, a1 + k, depth * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, PANEL * 4);
    _tile_stored(1, c + 16, PANEL * 4);
    if (TILES > 1) {
        _tile_stored(2, c + 16 * PANEL, PANEL * 4);
        _tile_stored(3, c + 16 * PANEL + 16, PANEL * 4);
    }
}
#else
static inline bool tiles_granted() { return false; }
static inline void tiles_configure() {}
static inline void tiles_release() {}
#endif

// Adds a [ROWS][count] times w [count][PANEL] to c; a's rows are `depth` apart. `ahead` is read soon.
template <int ROWS>
static inline void product(const float *a, int64_t depth, const float *w, int64_t count, float *c, const float *ahead) {
    v16 acc[ROWS][2];
    for (int i = 0; i < ROWS; ++i) acc[i][0] = load(c + i * PANEL), acc[i][1] = load(c + i * PANEL + 16);
    for (int64_t k = 0; k < count; ++k) {
        v16 w0 = load(w + k * PANEL), w1 = load(w + k * PANEL + 16);
        __builtin_prefetch(ahead + k * PANEL);
        __builtin_prefetch(ahead + k * PANEL + 16);
        for (int i = 0; i < ROWS; ++i) {
            v16 x = splat(a[i * depth + k]);
            acc[i][0] += x * w0;
            acc[i][1] += x * w1;
        }
    }
    for (int i = 0; i < ROWS; ++i) store(c + i * PANEL, acc[i][0]), store(c + i * PANEL + 16, acc[i][1]);
}

template <int ROWS> static inline void product(const bf16 *a, int64_t depth, const bf16 *w, float *c) {
    const bf16 *w1 = w + depth * 16;
    v16 acc[ROWS][2] = {};
    for (int64_t k = 0; k < depth; k += 2) {
        v16w p0, p1;
        memcpy(&p0, w + k * 16, sizeof p0);
        memcpy(&p1, w1 + k * 16, sizeof p1);
        for (int i = 0; i < ROWS; ++i) {
            uint32_t pair;
            memcpy(&pair, a + i * depth + k, sizeof pair);
            v16w x = pair - (v16w){};
#ifdef __AVX512BF16__
            acc[i][0] = (v16)_mm512_dpbf16_ps((__m512)acc[i][0], (__m512bh)x, (__m512bh)p0);
            acc[i][1] = (v16)_mm512_dpbf16_ps((__m512)acc[i][1], (__m512bh)x, (__m512bh)p1);
#else
            v16 even = (v16)(x << 16), odd = (v16)(x & 0xffff0000);
            acc[i][0] += even * (v16)(p0 << 16);
            acc[i][0] += odd * (v16)(p0 & 0xffff0000);
            acc[i][1] += even * (v16)(p1 << 16);
            acc[i][1] += odd * (v16)(p1 & 0xffff0000);
#endif
        }
    }
    for (int i = 0; i < ROWS; ++i) store(c + i * PANEL, acc[i][0]), store(c + i * PANEL + 16, acc[i][1]);
}

template <int ROWS>
static inline void products(const float *a, int64_t rows, int64_t depth, const float *w, int64_t count, float *c, const float *ahead) {
    if (rows == ROWS) return product<ROWS>(a, depth, w, count, c, ahead);
    if constexpr (ROWS > 1) products<ROWS - 1>(a, rows, depth, w, count, c, ahead);
}

// One panel times up to CHUNK rows of A, into c [CHUNK][PANEL]. The weights are taken in runs that
// stay in the nearest cache while all rows pass over them; sums go on in the same order across runs.
static inline void strip(const float *a, int64_t rows, int64_t depth, const float *w, float *c) {
    memset(c, 0, rows * PANEL * sizeof(float));
    const int64_t passes = (rows + TALLEST - 1) / TALLEST, tall = (rows + passes - 1) / passes;
    for (int64_t k = 0; k < depth; k += DEEPEST) {
        const int64_t count = depth - k < DEEPEST ? depth - k : DEEPEST;
        for (int64_t i = 0; i < rows; i += tall)
            products<TALLEST>(a + i * depth + k, rows - i < tall ? rows - i : tall, depth, w + k * PANEL, count, c + i * PANEL,
                              w + (k + count) * PANEL);
    }
}

// The same for bfloat16.
static inline void strip(const bf16 *a, int64_t rows, int64_t depth, const bf16 *w, float *c) {
#ifdef __AMX_BF16__
    if (tiles_granted()) {
        if (rows > 16) tiles_product<2>(a, depth, w, c);
        else tiles_product<1>(a, depth, w, c);
        return;
    }
#endif
    int64_t i = 0;
    for (; i + 8 <= rows; i += 8) product<8>(a + i * depth, depth, w, c + i * PANEL);
    if (rows - i >= 4) product<4>(a + i * depth, depth, w, c + i * PANEL), i += 4;
    if (rows - i == 3) product<3>(a + i * depth, depth, w, c + i * PANEL);
    if (rows - i == 2) product<2>(a + i * depth, depth, w, c + i * PANEL);
    if (rows - i == 1) product<1>(a + i * depth, depth, w, c + i * PANEL);
}

// emit(row, panel, c): 32 sums of one row. Threads that multiply bf16 called `tiles_configure`.
template <class T, class Emit>
static inline void gemm(Crew &crew, const T *a, int64_t rows, const T *packed, int64_t columns, int64_t depth, Emit emit) {
    const int64_t panels = (columns + PANEL - 1) / PANEL, chunks = (rows + CHUNK - 1) / CHUNK;
    crew.share(panels * chunks, [&](int64_t unit) {
        alignas(64) float c[CHUNK * PANEL];
        const int64_t panel = unit / chunks, first = unit % chunks * CHUNK;
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        strip(a + first * depth, count, depth, packed + panel * PANEL * depth, c);
        for (int64_t i = 0; i < count; ++i) emit(first + i, panel, c + i * PANEL);
    });
}

static inline void pack_at(float *packed, int64_t depth, int64_t n, int64_t k, float x) {
    packed[(n / PANEL * depth + k) * PANEL + n % PANEL] = x;
}

static inline void pack_at(bf16 *packed, int64_t depth, int64_t n, int64_t k, bf16 x) {
    packed[(n / 16 * (depth / 2) + k / 2) * 32 + n % 16 * 2 + k % 2] = x;
}

// Pack rows 0..rows-1 of weight [rows][k], row r to column (r / group) * stride + r % group + start:
// group == stride packs them in order; 16, 32 and start 0 or 16 interleave two weights.
template <class T>
static void pack(const T *weight, int64_t rows, int64_t k, T *packed, int64_t group, int64_t stride, int64_t start) {
    const int64_t depth = round_up(k, 32);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < k; ++i)
            pack_at(packed, depth, r / group * stride + r % group + start, i, weight[r * k + i]);
}
