// Paged attention with an online softmax over the pages of one row at a time.
//
// Knows: the layout of the arena (cluster/kv/store.py) and of a step (cluster/model/attention/base.py).
// Refuses to know: where queries come from.
//
// Keys are taken in runs of at most 32 tokens that never cross a page, always from the same
// boundaries; the runs of each SPAN positions make a softmax of their own, and those are merged in
// the order of positions. Spans may therefore be given to different threads, which is how a single
// long row keeps all of them busy, and a query's result still depends on its own row alone: not on
// other rows, not on the number of threads, and not on how many tokens of its row are computed in
// the same step.
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
    const int32_t *roots; // [rows], place of a row's first tree node; null: no row holds a tree
    const uint64_t *sights; // [tokens], bit j: sees node j of its row's tree; 0: a token before the tree
};

static const int RUN = 32;    // tokens taken at once
static const int SPAN = 256;  // positions of one softmax
static const int TILE = 32;   // queries x group of one unit of work, at most
static const int WIDEST = 256; // largest head dimension
static const int MOST_SHARES = 1024; // of one layer's attention between threads: bounds the room they take

// A softmax on its way: total and sums are relative to exp(highest).
struct Partial {
    float *sums, *highest, *total; // [queries][dim padded to 16], [queries], [queries]

    Partial(float *room, int64_t padded) : sums(room), highest(room + TILE * padded), total(highest + TILE) {}
    static int64_t floats(int64_t padded) { return TILE * (padded + 2); }
};

struct Scratch {
    alignas(64) float queries[TILE * WIDEST], keys[WIDEST * RUN], values[RUN * WIDEST];
    alignas(64) float weights[TILE * RUN];
    float fade[TILE];
    alignas(64) float span[TILE * (WIDEST + 2)], all[TILE * (WIDEST + 2)];
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

// Bits 0..n-1.
static inline uint32_t lowest(int64_t n) { return n <= 0 ? 0 : n >= RUN ? ~0u : (1u << n) - 1; }

// Which keys of the run of `count` from place `base` of a row on one query sees, a bit each.
static inline uint32_t visible(const Paged &p, int64_t row, int64_t token, int64_t base, int64_t count) {
    uint64_t nodes = p.sights ? p.sights[token] : 0;
    const int64_t root = nodes ? p.roots[row] : 0, here = token - p.starts[row] + p.firsts[row];
    const int64_t at = nodes ? root + __builtin_popcountll(nodes) - 1 : here; // its position
    const int64_t stop = nodes ? root : at + 1, from = p.window ? at - p.window + 1 : 0;
    const uint32_t known = lowest((stop < base + count ? stop : base + count) - base) & ~lowest(from - base);
    if (!nodes) return known;
    // Ancestors come in the order of their depths: the first leave the window first.
    for (int64_t extra = p.window ? __builtin_popcountll(nodes) - p.window : 0; extra > 0; --extra) nodes &= nodes - 1;
    const int64_t shift = root - base; // of node 0 in this run
    const uint64_t drafted = shift >= RUN || shift <= -64 ? 0 : shift >= 0 ? nodes << shift : nodes >> -shift;
    return known | ((uint32_t)drafted & lowest(count));
}

// Turn raw scores of one query into weights of the running softmax; key i of the run is visible where bit i is set.
static inline void soften(float *w, uint32_t seen, float scaling, float softcap, float &highest, float &total, float &fade) {
    fade = 1;
    if (!seen) {
        store(w, splat(0)), store(w + 16, splat(0));
        return;
    }
    const v16 hidden = splat(-__builtin_inff());
    v16 s[2], peak = splat(highest);
    for (int half = 0; half < 2; ++half) {
        s[half] = load(w + half * 16) * scaling;
        if (softcap) s[half] = softcap * vtanh(s[half] / softcap);
        v16i at = iota() + half * 16;
        s[half] = ((((int32_t)seen >> at) & 1) != 0) ? s[half] : hidden;
        peak = vmax(peak, s[half]);
    }
    const float top = max(peak);
    fade = vexp1(highest - top); // 0 for the first visible run: highest is -inf
    for (int half = 0; half < 2; ++half) store(w + half * 16, s[half] = vexp(s[half] - top));
    total = total * fade + sum(s[0] + s[1]);
    highest = top;
}

// Queries begin..end-1 of a row that are computed together, for the query heads of one kv head.
struct Tile {
    int64_t row, head, begin, end;
};

// queries(token, head, out): the query in float32, dim values.
template <class Queries> static inline void take_queries(const Paged &p, const Tile &t, Scratch &s, Queries queries) {
    const int64_t padded = round_up(p.dim, 16);
    for (int64_t i = 0; i < (t.end - t.begin) * p.group; ++i)
        queries(t.begin + i / p.group, t.head * p.group + i % p.group, s.queries + i * padded);
}

// One run of keys from position `base` on, for all queries of a tile.
template <class T>
static inline void attend_run(const Paged &p, const Tile &t, int64_t base, int64_t count, Scratch &s, const Partial &out) {
    const int64_t dim = p.dim, padded = round_up(dim, 16), m = (t.end - t.begin) * p.group;
    const int64_t page_bytes = p.block_tokens * dim * sizeof(T), offset = base % p.block_tokens;
    const char *page = p.pages + p.tables[t.row * p.width + base / p.block_tokens] * p.block_bytes + t.head * page_bytes;
    transpose_keys((const T *)page + offset * dim, count, dim, s.keys);
    spread_values((const T *)(page + p.heads * page_bytes) + offset * dim, count, dim, padded, s.values);
    for (int64_t i = 0; i < m; i += 4) {
        const float *q = s.queries + i * padded;
        float *w = s.weights + i * RUN, *sums = out.sums + i * padded;
        const int64_t rows = m - i < 4 ? m - i : 4;
        if (rows == 4) scores<4>(q, padded, dim, s.keys, w);
        else if (rows == 3) scores<3>(q, padded, dim, s.keys, w);
        else if (rows == 2) scores<2>(q, padded, dim, s.keys, w);
        else scores<1>(q, padded, dim, s.keys, w);
        for (int64_t j = 0; j < rows; ++j) {
            const uint32_t seen = visible(p, t.row, t.begin + (i + j) / p.group, base, count);
            soften(w + j * RUN, seen, p.scaling, p.softcap, out.highest[i + j], out.total[i + j], s.fade[i + j]);
        }
        if (rows == 4) blend<4>(w, s.fade + i, s.values, count, padded, sums);
        else if (rows == 3) blend<3>(w, s.fade + i, s.values, count, padded, sums);
        else if (rows == 2) blend<2>(w, s.fade + i, s.values, count, padded, sums);
        else blend<1>(w, s.fade + i, s.values, count, padded, sums);
    }
}

// Places a tile needs: from..known-1.
static inline int64_t needed_from(const Paged &p, const Tile &t) {
    int64_t at = t.begin + p.firsts[t.row] - p.starts[t.row];
    if (p.sights && p.roots[t.row] < at) at = p.roots[t.row]; // no node's position is lower
    const int64_t from = p.window ? at - p.window + 1 : 0;
    return from < 0 ? 0 : from;
}

static inline int64_t known(const Paged &p, const Tile &t) { return t.end + p.firsts[t.row] - p.starts[t.row]; }

// The softmax over the span-th SPAN positions; one that has seen nothing where the tile needs none of them.
template <class T>
static __attribute__((noinline)) void attend_span(const Paged &p, const Tile &t, int64_t span, Scratch &s, const Partial &out) {
    const int64_t m = (t.end - t.begin) * p.group, from = needed_from(p, t) / p.block_tokens * p.block_tokens;
    int64_t stop = (span + 1) * SPAN, base = span * SPAN;
    stop = known(p, t) < stop ? known(p, t) : stop; // keys past the last query of the tile are not needed
    base = from > base ? from : base;
    for (int64_t i = 0; i < m; ++i) out.highest[i] = -__builtin_inff(), out.total[i] = 0;
    if (base >= stop) return;
    memset(out.sums, 0, m * round_up(p.dim, 16) * sizeof(float));
    for (int64_t count; base < stop; base += count) {
        const int64_t left = p.block_tokens - base % p.block_tokens;
        count = left < RUN ? left : RUN;
        if (stop - base < count) count = stop - base;
        attend_run<T>(p, t, base, count, s, out);
    }
}

// Not inlined, as is attend_span: whoever calls them, the same instructions give the same bits.
static __attribute__((noinline)) void merge(int64_t padded, int64_t m, const Partial &span, const Partial &all) {
    for (int64_t i = 0; i < m; ++i) {
        if (span.highest[i] == -__builtin_inff()) continue; // this query sees nothing of the span
        const float top = span.highest[i] > all.highest[i] ? span.highest[i] : all.highest[i];
        const float before = vexp1(all.highest[i] - top), here = vexp1(span.highest[i] - top);
        for (int64_t d = i * padded; d < (i + 1) * padded; d += 16)
            store(all.sums + d, load(all.sums + d) * before + load(span.sums + d) * here);
        all.total[i] = all.total[i] * before + span.total[i] * here;
        all.highest[i] = top;
    }
}

// Nothing seen yet but the sinks, which weigh in the total alone.
static inline void start(const Paged &p, const Tile &t, const Partial &all) {
    const int64_t m = (t.end - t.begin) * p.group;
    memset(all.sums, 0, m * round_up(p.dim, 16) * sizeof(float));
    for (int64_t i = 0; i < m; ++i) {
        all.highest[i] = p.sinks ? p.sinks[t.head * p.group + i % p.group] : -__builtin_inff();
        all.total[i] = p.sinks ? 1 : 0;
    }
}

template <class Emit> static inline void finish(const Paged &p, const Tile &t, const Partial &all, Emit emit) {
    for (int64_t i = 0; i < (t.end - t.begin) * p.group; ++i)
        emit(t.begin + i / p.group, t.head * p.group + i % p.group, all.sums + i * round_up(p.dim, 16), 1.0f / all.total[i]);
}

// How a layer's attention is cut: tiles of every row for every kv head, and spans of positions.
struct Cut {
    int64_t step, tiles = 0, spans = 0; // queries a tile; tiles of all rows and heads; spans of the longest row

    explicit Cut(const Paged &p) : step(TILE / p.group > 0 ? TILE / p.group : 1) {
        for (int64_t r = 0; r < p.rows; ++r) {
            const int64_t tokens = p.starts[r + 1] - p.starts[r], reach = (p.firsts[r] + tokens + SPAN - 1) / SPAN;
            tiles += of_row(p, r) * p.heads;
            if (reach > spans) spans = reach;
        }
    }

    int64_t of_row(const Paged &p, int64_t row) const { return (p.starts[row + 1] - p.starts[row] + step - 1) / step; }

    // How many spans are computed apart; 0: the tiles alone are enough for every thread.
    int64_t shares() const { return spans > 1 && tiles * spans <= MOST_SHARES ? tiles * spans : 0; }

    Tile at(const Paged &p, int64_t index) const {
        int64_t tile = index / p.heads, row = 0;
        for (; tile >= of_row(p, row); ++row) tile -= of_row(p, row);
        const int64_t begin = p.starts[row] + tile * step, end = p.starts[row + 1];
        return {row, index % p.heads, begin, begin + step < end ? begin + step : end};
    }
};

// Floats the threads need together, beside their scratch.
static inline int64_t shared_floats(const Paged &p) { return Cut(p).shares() * Partial::floats(round_up(p.dim, 16)); }

// Two phases. emit(token, head, sums, factor). room: shared_floats(p).
template <class T, class Queries, class Emit>
static void attend(Crew &crew, const Paged &p, Scratch &s, float *room, Queries queries, Emit emit) {
    const Cut cut(p);
    const int64_t padded = round_up(p.dim, 16), apart = cut.shares();
    crew.share(apart, [&](int64_t unit) {
        const Tile tile = cut.at(p, unit / cut.spans);
        take_queries(p, tile, s, queries);
        attend_span<T>(p, tile, unit % cut.spans, s, Partial(room + unit * Partial::floats(padded), padded));
    });
    crew.share(cut.tiles, [&](int64_t unit) {
        const Tile tile = cut.at(p, unit);
        const int64_t m = (tile.end - tile.begin) * p.group;
        const Partial here(s.span, padded), all(s.all, padded);
        start(p, tile, all);
        if (!apart) take_queries(p, tile, s, queries);
        for (int64_t span = needed_from(p, tile) / SPAN; span * SPAN < known(p, tile); ++span) {
            if (!apart) attend_span<T>(p, tile, span, s, here);
            merge(padded, m, apart ? Partial(room + (unit * cut.spans + span) * Partial::floats(padded), padded) : here, all);
        }
        finish(p, tile, all, emit);
    });
}
