// Weights in 8 or 4 bits times rows rounded to 8, summed in integers.
//
// Knows: the packed layout, how rows are rounded, and the three ways to multiply (AMX tiles, VNNI, portable).
// Refuses to know: how the weights' levels were chosen; the caller's `emit` gets each finished strip.
//
// Along k, groups of 32 share a scale: weight = (level - zero) * scale + offset, activation = level * its scale.
// A group's levels are multiplied and summed exactly, in integers, whichever way; then
//     c += activation scale * (scale * sum of products + (offset - zero * scale) * sum of activations)
// so a row's result is the same whatever is computed beside it. Weights are in panels of 32 columns:
//     levels  [panel][k / 32][2 halves of 16 columns][8 quads of k][16][4] unsigned bytes, zero = 128; in 4 bits
//             zero = 0 and quads 0 to 3 are the low halves of the bytes whose high halves are quads 4 to 7
//     scales  [panel][k / 32][scale, offset][32 columns], half precision
#pragma once

#include "simd.h"
#include "team.h"
#include "tiles.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

static const int PANEL = 32; // columns of one panel
static const int CHUNK = 32; // rows of one unit of work
static const int GROUP = 32; // k that share a scale
static const int FEW = 6; // rows up to which tiles cost more than they save

struct Levels {
    const uint8_t *packed;
    const uint16_t *scales;
    int64_t bits; // 8 or 4

    float zero() const { return bits == 8 ? 128.0f : 0.0f; }
    int64_t group_bytes() const { return PANEL * GROUP * bits / 8; }
};

// Rows in 8 bits: levels [rows][depth], and for each group of a row its scale and the sum of what its levels stand for.
struct Rounded {
    int8_t *levels;
    float *scales, *sums;

    Rounded(void *room, int64_t rows, int64_t depth)
        : levels((int8_t *)room), scales((float *)(levels + rows * depth)), sums(scales + rows * depth / GROUP) {}

    static int64_t bytes(int64_t rows, int64_t depth) { return rows * depth + rows * depth / GROUP * 8; }
};

// Sixteen integers of a byte's size, a byte each.
static inline void narrow(int8_t *p, v16i x) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < 16; ++i) p[i] = (int8_t)x[i];
#endif
}

// Rounds to nearest even by adding 1.5 * 2^23. `sums` holds scale * sum of levels.
template <class T> static inline void round_row(const T *x, int64_t depth, int8_t *levels, float *scales, float *sums) {
    const float shift = 12582912.0f;
    for (int64_t g = 0; g < depth / GROUP; ++g, x += GROUP, levels += GROUP) {
        const v16 a = load(x), b = load(x + 16);
        const float most = max(vmax(vmax(a, -a), vmax(b, -b))), steps = most > 0 ? 127.0f / most : 0.0f;
        const v16 one = (a * steps + shift) - shift, two = (b * steps + shift) - shift;
        narrow(levels, __builtin_convertvector(one, v16i));
        narrow(levels + 16, __builtin_convertvector(two, v16i));
        scales[g] = most / 127.0f, sums[g] = scales[g] * sum(one + two);
    }
}

typedef uint8_t v64u __attribute__((vector_size(64)));

// One group of a panel: [2 halves][8 quads][16][4] bytes. In 8 bits they lie so already.
static inline const uint8_t *open_group(const Levels &w, int64_t index, uint8_t *room) {
    const uint8_t *packed = w.packed + index * w.group_bytes();
    if (w.bits == 8) return packed;
    for (int half = 0; half < 2; ++half)
        for (int quad = 0; quad < 4; ++quad) {
            v64u both;
            memcpy(&both, packed + half * 256 + quad * 64, sizeof both);
            const v64u low = both & 15, high = both >> 4;
            memcpy(room + half * 512 + quad * 64, &low, sizeof low);
            memcpy(room + half * 512 + (quad + 4) * 64, &high, sizeof high);
        }
    return room;
}

// Sums [PANEL] of products of one row's group; w: [2 halves][8 quads][16][4].
static inline void dot_group(const int8_t *a, const uint8_t *w, int32_t *sums) {
#ifdef __AVX512VNNI__
    __m512i left = _mm512_setzero_si512(), right = left;
    for (int quad = 0; quad < 8; ++quad) {
        int32_t four;
        memcpy(&four, a + quad * 4, sizeof four);
        const __m512i x = _mm512_set1_epi32(four);
        left = _mm512_dpbusd_epi32(left, _mm512_loadu_si512(w + quad * 64), x);
        right = _mm512_dpbusd_epi32(right, _mm512_loadu_si512(w + 512 + quad * 64), x);
    }
    _mm512_storeu_si512(sums, left);
    _mm512_storeu_si512(sums + 16, right);
#else
    memset(sums, 0, PANEL * sizeof(int32_t));
    for (int quad = 0; quad < 8; ++quad)
        for (int column = 0; column < PANEL; ++column) {
            const uint8_t *four = w + column / 16 * 512 + quad * 64 + column % 16 * 4;
            for (int k = 0; k < 4; ++k) sums[column] += (int32_t)a[quad * 4 + k] * four[k];
        }
#endif
}

#ifdef __AMX_INT8__
// A: 16 rows of 32 bytes; B: 8 quads of 64.
static inline void level_tiles_configure() {
    TileShapes shapes;
    shapes.set(0, 4, 16, 64);
    shapes.set(4, 6, 16, GROUP);
    shapes.set(6, 8, GROUP / 4, 64);
    shapes.load();
}

// Sums [32 rows][PANEL] of one group; a's rows are `depth` apart and there are 16 or 32 of them.
static inline void dot_tiles(const int8_t *a, int64_t rows, int64_t depth, const uint8_t *w, int32_t *sums) {
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + 512, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, a, depth);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (rows <= 16) return;
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, a + 16 * depth, depth);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
    _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
    _tile_stored(3, sums + 16 * PANEL + 16, PANEL * 4);
}
#else
static inline void level_tiles_configure() {}
static inline void dot_tiles(const int8_t *, int64_t, int64_t, const uint8_t *, int32_t *) {}
#endif

// One panel times rows first .. first + count of A, into c [CHUNK][PANEL].
static inline void level_strip(const Rounded &a, int64_t first, int64_t count, int64_t depth, const Levels &w, int64_t panel, bool tiles, float *c) {
    alignas(64) uint8_t room[PANEL * GROUP];
    alignas(64) int32_t sums[CHUNK * PANEL];
    const int64_t groups = depth / GROUP;
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t *levels = open_group(w, panel * groups + g, room);
        const uint16_t *scales = w.scales + (panel * groups + g) * 2 * PANEL;
        const int8_t *rows = a.levels + first * depth + g * GROUP;
        if (tiles) dot_tiles(rows, count, depth, levels, sums);
        else
            for (int64_t i = 0; i < count; ++i) dot_group(rows + i * depth, levels, sums + i * PANEL);
        const v16 scale[2] = {load_half(scales), load_half(scales + 16)};
        const v16 offset[2] = {load_half(scales + PANEL) - scale[0] * w.zero(), load_half(scales + PANEL + 16) - scale[1] * w.zero()};
        for (int64_t i = 0; i < count; ++i) {
            const v16 row_scale = splat(a.scales[(first + i) * groups + g]), row_sum = splat(a.sums[(first + i) * groups + g]);
            for (int half = 0; half < 2; ++half) {
                v16i products;
                memcpy(&products, sums + i * PANEL + half * 16, sizeof products);
                float *to = c + i * PANEL + half * 16;
                store(to, load(to) + row_sum * offset[half] + __builtin_convertvector(products, v16) * scale[half] * row_scale);
            }
        }
    }
}

// emit(row, panel, c): 32 sums of one row. `granted`: threads may use tiles; they are left configured for levels.
template <class Emit>
static inline void level_gemm(Crew &crew, const Rounded &a, int64_t rows, const Levels &w, int64_t columns, int64_t depth, bool granted, Emit emit) {
    const int64_t panels = (columns + PANEL - 1) / PANEL, chunks = (rows + CHUNK - 1) / CHUNK;
    const bool tiles = granted && rows > FEW;
    crew.share(panels * chunks, [&](int64_t unit) {
        alignas(64) float c[CHUNK * PANEL];
        const int64_t panel = unit / chunks, first = unit % chunks * CHUNK;
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        memset(c, 0, count * PANEL * sizeof(float));
        level_strip(a, first, count, depth, w, panel, tiles, c);
        for (int64_t i = 0; i < count; ++i) emit(first + i, panel, c + i * PANEL);
    });
}
