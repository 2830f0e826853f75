// Paged attention with an online softmax over the pages of one row at a time.
//
// Knows: the layout of the arena (cluster/kv/store.py) and of a step (cluster/model/attention/base.py).
// Refuses to know: where queries come from.
//
// Keys are taken in runs of at most 32 tokens that never cross a page, always from the same
// boundaries, so a query's result depends on its own row alone: not on other rows, and not on how
// many tokens of its row are computed in the same step.
#pragma once

#include "gemm.h"

// Mirrored by cluster/model/attention/cpu.py.
struct Paged {
    const char *pages; // keys of block 0 of this layer; values follow the keys of all heads
    int64_t block_bytes, block_tokens, heads, dim;
    const int32_t *starts, *firsts, *tables; // [rows + 1], [rows], [rows][width]
    int64_t rows, width;
    int64_t group; // query heads a kv head
    float scaling, softcap; // softcap 0: none
    int64_t window; // 0: none
    const float *sinks; // [query heads] or null
};

static const int RUN = 32;    // tokens taken at once
static const int TILE = 32;   // queries x group of one unit of work, at most
static const int WIDEST = 256; // largest head dimension

struct Scratch {
    alignas(64) float queries[TILE * WIDEST], sums[TILE * WIDEST], keys[WIDEST * RUN], values[RUN * WIDEST];
    alignas(64) float weights[TILE * RUN];
    float highest[TILE], total[TILE], fade[TILE];
};

// keys [count][dim] -> out [dim][RUN] in float32; lanes past count are zero.
static inline void transpose_keys(const float *keys, int64_t count, int64_t dim, float *out) {
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16)
        for (int half = 0; half < RUN; half += 16) {
            v16w r[16] = {};
            for (int i = 0; i < 16 && half + i < count; ++i) memcpy(&r[i], keys + (half + i) * dim + d, 64);
            transpose(r);
            for (int i = 0; i < 16; ++i) memcpy(out + (d + i) * RUN + half, &r[i], 64);
        }
    for (; d < dim; ++d)
        for (int i = 0; i < RUN; ++i) out[d * RUN + i] = i < count ? keys[i * dim + d] : 0;
}

static inline void transpose_keys(const bf16 *keys, int64_t count, int64_t dim, float *out) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32)
        for (int half = 0; half < RUN; half += 16) {
            v16w r[16] = {}; // pairs of neighbouring dimensions travel as one word
            for (int i = 0; i < 16 && half + i < count; ++i) memcpy(&r[i], keys + (half + i) * dim + d, 64);
            transpose(r);
            for (int i = 0; i < 16; ++i) {
                store(out + (d + 2 * i) * RUN + half, (v16)(r[i] << 16));
                store(out + (d + 2 * i + 1) * RUN + half, (v16)(r[i] & 0xffff0000));
            }
        }
    for (; d < dim; ++d)
        for (int i = 0; i < RUN; ++i) out[d * RUN + i] = i < count ? widen(keys[i * dim + d]) : 0;
}

// values [count][dim] -> out [count][padded] in float32, zero beyond dim.
template <class T>
static inline void spread_values(const T *values, int64_t count, int64_t dim, int64_t padded, float *out) {
    for (int64_t i = 0; i < count; ++i) {
        int64_t d = 0;
        for (; d + 16 <= dim; d += 16) store(out + i * padded + d, load(values + i * dim + d));
        for (; d < padded; ++d) out[i * padded + d] = d < dim ? widen(values[i * dim + d]) : 0;
    }
}

template <int ROWS> static inline void scores(const float *q, int64_t padded, int64_t dim, const float *keys, float *out) {
    v16 acc[ROWS][2] = {};
    for (int64_t d = 0; d < dim; ++d) {
        v16 k0 = load(keys + d * RUN), k1 = load(keys + d * RUN + 16);
        for (int i = 0; i < ROWS; ++i) {
            v16 x = splat(q[i * padded + d]);
            acc[i][0] += x * k0;
            acc[i][1] += x * k1;
        }
    }
    for (int i = 0; i < ROWS; ++i) store(out + i * RUN, acc[i][0]), store(out + i * RUN + 16, acc[i][1]);
}

template <int ROWS>
static inline void blend(const float *w, const float *fade, const float *values, int64_t count, int64_t padded, float *sums) {
    for (int64_t d = 0; d < padded; d += 16) {
        v16 acc[ROWS];
        for (int i = 0; i < ROWS; ++i) acc[i] = load(sums + i * padded + d) * fade[i];
        for (int64_t t = 0; t < count; ++t) {
            v16 v = load(values + t * padded + d);
            for (int i = 0; i < ROWS; ++i) acc[i] += splat(w[i * RUN + t]) * v;
        }
        for (int i = 0; i < ROWS; ++i) store(sums + i * padded + d, acc[i]);
    }
}

// Turn raw scores of one query into weights of the running softmax; keys lo..hi-1 of the run are visible.
static inline void soften(float *w, int64_t lo, int64_t hi, float scaling, float softcap, float &highest, float &total, float &fade) {
    fade = 1;
    if (lo >= hi) {
        store(w, splat(0)), store(w + 16, splat(0));
        return;
    }
    const v16 hidden = splat(-__builtin_inff());
    v16 s[2], peak = splat(highest);
    for (int half = 0; half < 2; ++half) {
        s[half] = load(w + half * 16) * scaling;
        if (softcap) s[half] = softcap * vtanh(s[half] / softcap);
        v16i at = iota() + half * 16;
        s[half] = ((at >= (int32_t)lo) & (at < (int32_t)hi)) ? s[half] : hidden;
        peak = vmax(peak, s[half]);
    }
    const float top = max(peak);
    fade = vexp1(highest - top); // 0 for the first visible run: highest is -inf
    for (int half = 0; half < 2; ++half) store(w + half * 16, s[half] = vexp(s[half] - top));
    total = total * fade + sum(s[0] + s[1]);
    highest = top;
}

// queries(token, head, out): the query in float32, dim values. emit(token, head, sums, factor).
template <class T, class Queries, class Emit>
static void attend_tile(const Paged &p, int64_t row, int64_t head, int64_t begin, int64_t end, Scratch &s, Queries queries, Emit emit) {
    const int64_t group = p.group, dim = p.dim, padded = round_up(dim, 16), m = (end - begin) * group;
    const int64_t origin = p.firsts[row] - p.starts[row]; // token index + origin = position
    for (int64_t i = 0; i < m; ++i) {
        const int64_t query_head = head * group + i % group;
        queries(begin + i / group, query_head, s.queries + i * padded);
        s.highest[i] = p.sinks ? p.sinks[query_head] : -__builtin_inff();
        s.total[i] = p.sinks ? 1 : 0;
        memset(s.sums + i * padded, 0, padded * sizeof(float));
    }
    const int64_t known = end + origin; // keys past the last query of the tile are not needed
    int64_t from = p.window ? begin + origin - p.window + 1 : 0;
    from = from < 0 ? 0 : from;
    const int64_t page_bytes = p.block_tokens * dim * sizeof(T);
    for (int64_t base = from / p.block_tokens * p.block_tokens, count; base < known; base += count) {
        const int64_t offset = base % p.block_tokens;
        count = p.block_tokens - offset < RUN ? p.block_tokens - offset : RUN;
        if (known - base < count) count = known - base;
        const char *page = p.pages + p.tables[row * p.width + base / p.block_tokens] * p.block_bytes + head * page_bytes;
        transpose_keys((const T *)page + offset * dim, count, dim, s.keys);
        spread_values((const T *)(page + p.heads * page_bytes) + offset * dim, count, dim, padded, s.values);
        for (int64_t i = 0; i < m; i += 4) {
            const float *q = s.queries + i * padded;
            float *w = s.weights + i * RUN, *sums = s.sums + i * padded;
            const int64_t rows = m - i < 4 ? m - i : 4;
            if (rows == 4) scores<4>(q, padded, dim, s.keys, w);
            else if (rows == 3) scores<3>(q, padded, dim, s.keys, w);
            else if (rows == 2) scores<2>(q, padded, dim, s.keys, w);
            else scores<1>(q, padded, dim, s.keys, w);
            for (int64_t j = 0; j < rows; ++j) {
                const int64_t at = begin + (i + j) / group + origin - base; // the query's position in this run
                soften(w + j * RUN, p.window ? at - p.window + 1 : 0, at + 1 < count ? at + 1 : count, p.scaling, p.softcap,
                       s.highest[i + j], s.total[i + j], s.fade[i + j]);
            }
            if (rows == 4) blend<4>(w, s.fade + i, s.values, count, padded, sums);
            else if (rows == 3) blend<3>(w, s.fade + i, s.values, count, padded, sums);
            else if (rows == 2) blend<2>(w, s.fade + i, s.values, count, padded, sums);
            else blend<1>(w, s.fade + i, s.values, count, padded, sums);
        }
    }
    for (int64_t i = 0; i < m; ++i)
        emit(begin + i / group, head * group + i % group, s.sums + i * padded, 1.0f / s.total[i]);
}

template <class T, class Queries, class Emit>
static void attend(Crew &crew, const Paged &p, Scratch &s, Queries queries, Emit emit) {
    const int64_t step = TILE / p.group > 0 ? TILE / p.group : 1;
    int64_t tiles = 0;
    for (int64_t r = 0; r < p.rows; ++r) tiles += (p.starts[r + 1] - p.starts[r] + step - 1) / step;
    crew.share(tiles * p.heads, [&](int64_t unit) {
        int64_t tile = unit / p.heads, row = 0, mine;
        while (tile >= (mine = (p.starts[row + 1] - p.starts[row] + step - 1) / step)) tile -= mine, ++row;
        const int64_t begin = p.starts[row] + tile * step;
        const int64_t end = begin + step < p.starts[row + 1] ? begin + step : p.starts[row + 1];
        attend_tile<T>(p, row, unit % p.heads, begin, end, s, queries, emit);
    });
}
