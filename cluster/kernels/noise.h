// The draw: argmax over a row of logits plus Gumbel noise, without the noise ever being stored.
//
// Knows: the hash and the transform of cluster/model/sample.py, its twin: the same 31 bits for each
// (key, token), the same float32 formula with logarithms good to about two units in the last place.
// Refuses to know: what the logits mean.
//
// What cannot win is not computed, which leaves the answer unchanged. Noise is at most -log(2^-32) <
// 22.2: a token that far below a sum already found is not even hashed. And noise above d asks for a
// hash below exp(-d), as -log(1 - v) >= v: logarithms are taken of the few tokens that pass this.
//
// Legend: a row is cut into segments of SEGMENT tokens; the answer depends on the row alone.
#pragma once

#include "simd.h"
#include "team.h"

#ifdef __AVX512DQ__
#include <immintrin.h>
#endif

typedef uint64_t v8l __attribute__((vector_size(64)));
typedef uint32_t v8w __attribute__((vector_size(32)));

static const int64_t SEGMENT = 8192;
static const float MOST_NOISE = 22.2f;

// log(x) of positive normal x to about one unit in the last place (the polynomial of Cephes' logf).
static inline v16 vlog(v16 x) {
    v16w bits = (v16w)x + (0x3f800000 - 0x3f3504f3); // from sqrt(1/2): mantissas in [sqrt(1/2), sqrt(2))
    v16 e = __builtin_convertvector((v16i)(bits >> 23) - 127, v16);
    v16 r = (v16)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f, z = r * r;
    v16 y = r * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * r + 1.1676998740e-1f;
    y = y * r - 1.2420140846e-1f;
    y = y * r + 1.4249322787e-1f;
    y = y * r - 1.6668057665e-1f;
    y = y * r + 2.0000714765e-1f;
    y = y * r - 2.4999993993e-1f;
    y = y * r + 3.3333331174e-1f;
    y = y * r * z + e * -2.12194440e-4f - z * 0.5f;
    return r + y + e * 0.693359375f;
}

// -log(1 - v) for v in (0, 1): log(u) corrected for the rounding of u = 1 - v.
static inline v16 minus_log1m(v16 v) {
    v16 u = 1.0f - v, lost = 1.0f - u; // exactly what u has taken away
    return lost == 0.0f ? v : -vlog(u) * (v / (lost == 0.0f ? splat(1.0f) : lost));
}

static inline v8w hash(uint64_t key, uint64_t first) {
    const v8l lanes = {1, 2, 3, 4, 5, 6, 7, 8}; // token t is hashed as t + 1
    v8l x = (lanes + first) * 0x9E3779B97F4A7C15ull + key;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return __builtin_convertvector((x ^ (x >> 31)) >> 33, v8w);
}

// Of tokens first..first+15: uniform in (0, 1).
static inline v16 uniform(uint64_t key, uint64_t first) {
    v8w halves[2] = {hash(key, first), hash(key, first + 8)};
    v16i bits;
    memcpy(&bits, halves, sizeof bits);
    v16 v = (__builtin_convertvector(bits, v16) + 0.5f) * 0x1p-31f;
    const v16 most = splat(1.0f - 0x1p-24f);
    return v < most ? v : most;
}

static inline v16 gumbel(v16 v) { return -vlog(minus_log1m(v)); }

// At least exp(x), at most 7 percent more, for x of -87 to 0: between powers of two, the chord.
static inline v16 exp_above(v16 x) {
    v16 y = x * 1.4427f;
    y = y > -126.0f ? y : splat(-126.0f);
    y = y < 1.0f ? y : splat(1.0f);
    return (v16)__builtin_convertvector((y + 127.001f) * 8388608.0f, v16i);
}

struct Best {
    float sum;
    int64_t token;
};

// Among equal sums the lowest token wins, as in torch.
static inline void improve(Best &best, float sum, int64_t token) {
    if (sum > best.sum || (sum == best.sum && token < best.token)) best = {sum, token};
}

static inline v16 load_padded(const float *logits, int64_t count) {
    if (count >= 16) return load(logits);
    v16 x = splat(-__builtin_inff());
    memcpy(&x, logits, count * sizeof(float));
    return x;
}

// Whether any lane reaches its bound.
static inline bool reaches(v16 x, v16 bound) {
    v16i hit = x >= bound;
#ifdef __AVX512DQ__
    return _mm512_movepi32_mask((__m512i)hit);
#else
    int32_t any = 0;
    for (int i = 0; i < 16; ++i) any |= hit[i];
    return any;
#endif
}

// The likeliest token of a segment.
static inline Best peak(const float *logits, int64_t from, int64_t to) {
    v16 top = splat(-__builtin_inff());
    for (int64_t t = from; t < to; t += 16) top = vmax(top, load_padded(logits + t, to - t));
    const float highest = max(top);
    for (int64_t t = from; t < to; ++t)
        if (logits[t] == highest) return {highest, t};
    return {highest, from};
}

// Below the best sum by more than its rounding and that of the logarithms: what lies under cannot win.
static inline float just_below(float sum) { return sum - (1e-4f + 5e-7f * __builtin_fabsf(sum)); }

static inline Best winner(const float *logits, uint64_t key, int64_t from, int64_t to, Best best) {
    float low = just_below(best.sum);
    for (int64_t t = from; t < to; t += 16) {
        const v16 x = load_padded(logits + t, to - t);
        if (!reaches(x, splat(low - MOST_NOISE))) continue;
        const v16 v = uniform(key, t);
        if (!reaches(exp_above(x - low), v)) continue;
        const v16 sums = x + gumbel(v);
        for (int64_t i = 0; i < 16 && t + i < to; ++i) improve(best, sums[i], t + i);
        low = just_below(best.sum);
    }
    return best;
}

static inline int64_t segments(int64_t vocabulary) { return (vocabulary + SEGMENT - 1) / SEGMENT; }

// tokens[i] = argmax over t of logits[rows[i] * stride + t] + noise(keys[i], t). found: room for
// 2 * count * segments. A row of nothing but -inf gives token 0.
static void draw(Crew &crew, const float *logits, int64_t stride, const int64_t *rows, int64_t count, int64_t vocabulary,
                 const uint64_t *keys, Best *found, int64_t *tokens) {
    const int64_t cuts = segments(vocabulary);
    Best *peaks = found, *winners = found + count * cuts;
    auto end = [&](int64_t unit) {
        const int64_t to = unit % cuts * SEGMENT + SEGMENT;
        return to < vocabulary ? to : vocabulary;
    };
    crew.share(count * cuts, [&](int64_t unit) {
        peaks[unit] = peak(logits + rows[unit / cuts] * stride, unit % cuts * SEGMENT, end(unit));
    });
    crew.share(count * cuts, [&](int64_t unit) {
        const int64_t i = unit / cuts;
        Best best = peaks[i * cuts];
        for (int64_t s = 1; s < cuts; ++s) improve(best, peaks[i * cuts + s].sum, peaks[i * cuts + s].token);
        best.sum += gumbel(uniform(keys[i], best.token))[0];
        winners[unit] = winner(logits + rows[i] * stride, keys[i], unit % cuts * SEGMENT, end(unit), best);
    });
    crew.share(count, [&](int64_t i) {
        Best best = winners[i * cuts];
        for (int64_t s = 1; s < cuts; ++s) improve(best, winners[i * cuts + s].sum, winners[i * cuts + s].token);
        tokens[i] = best.token;
    });
}
