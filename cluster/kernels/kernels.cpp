// The entry points, plain C: paged attention, packed linears and the halves of a decoder layer.
//
// Knows: how the pieces of gemm.h and attention.h follow one another in a layer.
// Refuses to know: models; Python checks every layer against the modelling code at load.
//
// The residual stream is float32 throughout. T is the type of weights, pages and of what enters a
// product. Structures are mirrored by cluster/kernels/library.py.
#include "attention.h"

struct Linear {
    const void *packed;
    const float *bias; // or null
    int64_t columns, depth; // depth is K padded to a multiple of 32
};

// One step's view of the arena for writing, and its rotary factors.
struct Place {
    char *pages; // keys of block 0 of this layer
    const int64_t *slots; // [tokens], block * block_tokens + offset
    const float *cosines, *sines; // [tokens][rotary], halves of the rotation as in transformers
    int64_t rotary;
};

struct AttentionHalf {
    Linear qkv, out;
    const float *norm, *query_norm, *key_norm; // the last two or null
    float epsilon;
    int64_t hidden, heads, group, dim; // heads are kv heads
};

struct FeedForwardHalf {
    Linear gate_up, down; // gate and up interleaved in sixteens
    const float *norm;
    float epsilon;
    int64_t hidden, inner;
};

// out = T(x * rsqrt(mean(x^2) + epsilon) * weight), n values, any n.
template <class O> static inline void rms_norm(const float *x, const float *weight, float epsilon, int64_t n, O *out) {
    v16 acc = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 v = load(x + i);
        acc += v * v;
    }
    float squares = sum(acc);
    for (; i < n; ++i) squares += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(squares / n + epsilon);
    for (i = 0; i + 16 <= n; i += 16) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < n; ++i) narrow(out + i, x[i] * factor * weight[i]);
}

static inline void rotate(float *x, const float *cosines, const float *sines, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

// Calls emit(row, first column, width, values) with the bias added, width 32 but for the last panel.
template <class T, class Emit>
static inline void linear(const Linear &l, const T *a, int64_t rows, Emit emit) {
    gemm(a, rows, (const T *)l.packed, l.columns, l.depth, [&](int64_t row, int64_t panel, float *c) {
        const int64_t at = panel * PANEL, width = l.columns - at < PANEL ? l.columns - at : PANEL;
        if (l.bias)
            for (int64_t i = 0; i < width; ++i) c[i] += l.bias[at + i];
        emit(row, at, width, c);
    });
}

template <class T> static inline void write_head(const Paged &p, const Place &place, int64_t token, int64_t head, int64_t half, const float *x) {
    const int64_t slot = place.slots[token], block = slot / p.block_tokens, offset = slot % p.block_tokens;
    char *page = place.pages + block * p.block_bytes + (half * p.heads + head) * p.block_tokens * p.dim * sizeof(T);
    T *out = (T *)page + offset * p.dim;
    for (int64_t d = 0; d < p.dim; ++d) narrow(out + d, x[d]);
}

// stream [tokens][hidden] += attention half. normed, attended: T [tokens padded to 16][depth of qkv, out];
// projected: float [tokens][(group + 2) * heads * dim].
template <class T>
static void attention_half(const AttentionHalf &l, const Paged &p, const Place &place, int64_t tokens, float *stream, T *normed, float *projected, T *attended) {
    const int64_t queries = l.heads * l.group, width = (queries + 2 * l.heads) * l.dim;
    Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) rms_norm(stream + t * l.hidden, l.norm, l.epsilon, l.hidden, normed + t * l.qkv.depth);
    linear(l.qkv, normed, tokens, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        memcpy(projected + row * width + at, c, n * sizeof(float));
    });
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < tokens * (queries + 2 * l.heads); ++unit) {
        const int64_t t = unit / (queries + 2 * l.heads), head = unit % (queries + 2 * l.heads);
        float *x = projected + t * width + head * l.dim;
        if (head < queries + l.heads) {
            const float *norm = head < queries ? l.query_norm : l.key_norm;
            if (norm) rms_norm(x, norm, l.epsilon, l.dim, x);
            rotate(x, place.cosines + t * place.rotary, place.sines + t * place.rotary, place.rotary);
            if (head >= queries) write_head<T>(p, place, t, head - queries, 0, x);
        } else {
            write_head<T>(p, place, t, head - queries - l.heads, 1, x);
        }
    }
    attend<T>(p, scratch,
        [&](int64_t t, int64_t head, float *q) { memcpy(q, projected + t * width + head * l.dim, l.dim * sizeof(float)); },
        [&](int64_t t, int64_t head, const float *sums, float factor) {
            T *out = attended + t * l.out.depth + head * l.dim;
            for (int64_t d = 0; d < l.dim; ++d) narrow(out + d, sums[d] * factor);
        });
    linear(l.out, attended, tokens, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        for (int64_t i = 0; i < n; ++i) stream[row * l.hidden + at + i] += c[i];
    });
}

// stream [tokens][hidden] += feed-forward half. normed, active: T [tokens padded to 16][depth of gate_up, down].
template <class T> static void feed_forward_half(const FeedForwardHalf &l, int64_t tokens, float *stream, T *normed, T *active) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) rms_norm(stream + t * l.hidden, l.norm, l.epsilon, l.hidden, normed + t * l.gate_up.depth);
    linear(l.gate_up, normed, tokens, [&](int64_t row, int64_t at, int64_t, const float *c) {
        T *out = active + row * l.down.depth + at / 2; // one panel: 16 gates, then the 16 they gate
        store(out, vsilu(load(c)) * load(c + 16));
    });
    linear(l.down, active, tokens, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        for (int64_t i = 0; i < n; ++i) stream[row * l.hidden + at + i] += c[i];
    });
}

// logits [rows][columns] of the given tokens: final norm and head.
template <class T>
static void head(const Linear &l, const float *norm, float epsilon, int64_t hidden, const float *stream, const int64_t *wanted, int64_t rows, T *normed, float *logits) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) rms_norm(stream + wanted[r] * hidden, norm, epsilon, hidden, normed + r * l.depth);
    linear(l, normed, rows, [&](int64_t row, int64_t at, int64_t n, const float *c) { memcpy(logits + row * l.columns + at, c, n * sizeof(float)); });
}

// out [rows][columns] of O = in [rows][k] of T; staged: T [rows padded to 16][depth], zero beyond k.
template <class T, class O> static void project(const Linear &l, const T *in, int64_t rows, int64_t k, T *staged, O *out) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) memcpy(staged + r * l.depth, in + r * k, k * sizeof(T));
    linear(l, staged, rows, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        O *to = out + row * l.columns + at;
        if (n == PANEL) store(to, load(c)), store(to + 16, load(c + 16));
        else for (int64_t i = 0; i < n; ++i) narrow(to + i, c[i]);
    });
}

template <class T> static void attend_tensor(const Paged &p, const T *queries, int64_t token_stride, int64_t head_stride, T *out) {
    Scratch scratch;
    attend<T>(p, scratch,
        [&](int64_t t, int64_t head, float *q) {
            for (int64_t d = 0; d < p.dim; ++d) q[d] = widen(queries[t * token_stride + head * head_stride + d]);
        },
        [&](int64_t t, int64_t head, const float *sums, float factor) {
            T *to = out + (t * p.heads * p.group + head) * p.dim;
            for (int64_t d = 0; d < p.dim; ++d) narrow(to + d, sums[d] * factor);
        });
}

#define FOR_BOTH_TYPES(name, parameters, call)                                                     \
    extern "C" void name##_float32 parameters { typedef float T; _Pragma("omp parallel num_threads(threads)") call; } \
    extern "C" void name##_bfloat16 parameters { typedef bf16 T; _Pragma("omp parallel num_threads(threads)") call; }

FOR_BOTH_TYPES(attention_half,
    (int threads, const AttentionHalf *l, const Paged *p, const Place *place, int64_t tokens, float *stream, void *normed, float *projected, void *attended),
    attention_half<T>(*l, *p, *place, tokens, stream, (T *)normed, projected, (T *)attended))

FOR_BOTH_TYPES(feed_forward_half,
    (int threads, const FeedForwardHalf *l, int64_t tokens, float *stream, void *normed, void *active),
    feed_forward_half<T>(*l, tokens, stream, (T *)normed, (T *)active))

FOR_BOTH_TYPES(head,
    (int threads, const Linear *l, const float *norm, float epsilon, int64_t hidden, const float *stream, const int64_t *wanted, int64_t rows, void *normed, float *logits),
    head<T>(*l, norm, epsilon, hidden, stream, wanted, rows, (T *)normed, logits))

FOR_BOTH_TYPES(project,
    (int threads, const Linear *l, const void *in, int64_t rows, int64_t k, void *staged, void *out),
    (project<T, T>(*l, (const T *)in, rows, k, (T *)staged, (T *)out)))

FOR_BOTH_TYPES(project_wide,
    (int threads, const Linear *l, const void *in, int64_t rows, int64_t k, void *staged, float *out),
    (project<T, float>(*l, (const T *)in, rows, k, (T *)staged, out)))

FOR_BOTH_TYPES(attend,
    (int threads, const Paged *p, const void *queries, int64_t token_stride, int64_t head_stride, void *out),
    attend_tensor<T>(*p, (const T *)queries, token_stride, head_stride, (T *)out))

extern "C" void pack_float32(const float *weight, int64_t rows, int64_t k, float *packed, int64_t group, int64_t stride, int64_t start) {
    pack(weight, rows, k, packed, group, stride, start);
}

extern "C" void pack_bfloat16(const bf16 *weight, int64_t rows, int64_t k, bf16 *packed, int64_t group, int64_t stride, int64_t start) {
    pack(weight, rows, k, packed, group, stride, start);
}
