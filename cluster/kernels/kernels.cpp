// The entry points, plain C: a decoder's whole step, paged attention alone, packed linears alone, keyed draws.
//
// Knows: how the pieces of gemm.h and attention.h follow one another in a layer.
// Refuses to know: models; Python checks every layer against the modelling code at load.
//
// The residual stream is float32 throughout. T is the type of weights, pages and of what enters a
// product. Structures are mirrored by cluster/kernels/library.py.
#include "attention.h"
#include "noise.h"

#include <memory>
#include <vector>

struct Linear {
    const void *packed;
    const float *bias; // or null
    int64_t columns, depth; // depth is K padded to a multiple of 32
    const uint16_t *scales; // of weights in few bits (levels.h)
    int64_t bits; // 8 or 4; 0: whole
};

struct Layer {
    Linear qkv, out, gate_up, down; // gate and up interleaved in sixteens
    const float *before, *after, *query_norm, *key_norm; // weights of norms; the last two or null
    float epsilon, scaling;
    int64_t window; // 0: none
};

// Buffers have rows for the tokens padded to 16, and as many columns as the product that reads them is deep.
struct Step {
    const Layer *layers;
    int64_t num_layers, layer_bytes; // from one layer's pages to the next's
    Paged paged; // of layer 0; scaling and window come from the layers
    const int64_t *slots; // [tokens], block * block_tokens + offset
    const float *cosines, *sines; // [tokens][rotary], laid out as in transformers
    int64_t rotary, hidden, num_tokens;
    const void *embedding; // T [vocabulary][hidden], or null: stream is given
    const int64_t *tokens;
    float *stream; // [tokens][hidden]
    void *normed, *attended, *active;
    void *levels; // Rounded::bytes of the tokens padded to 16 and the deepest product, where weights are in few bits
    float *projected; // [tokens][columns of qkv]
    Linear head;
    const float *norm;
    float epsilon;
    const int64_t *wanted; // indices of the tokens that want logits
    int64_t num_wanted;
    float *logits; // [wanted][columns of head]
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

// Calls emit(row, first column, width, values) with the bias added; width is 32 but for the last panel.
// levels: Rounded::bytes of room where weights are in few bits. Two phases then, else one.
template <class T, class Emit>
static inline void linear(Crew &crew, const Linear &l, const T *a, int64_t rows, void *levels, Emit emit) {
    const auto finish = [&](int64_t row, int64_t panel, float *c) {
        const int64_t at = panel * PANEL, width = l.columns - at < PANEL ? l.columns - at : PANEL;
        if (l.bias)
            for (int64_t i = 0; i < width; ++i) c[i] += l.bias[at + i];
        emit(row, at, width, c);
    };
    if (!l.bits) return gemm(crew, a, rows, (const T *)l.packed, l.columns, l.depth, finish);
    const Rounded rounded(levels, round_up(rows, 16), l.depth);
    const int64_t groups = l.depth / GROUP;
    crew.share(rows, [&](int64_t r) {
        round_row(a + r * l.depth, l.depth, rounded.levels + r * l.depth, rounded.scales + r * groups, rounded.sums + r * groups);
    });
    const bool tiles = tiles_granted();
    if (tiles) level_tiles_configure();
    level_gemm(crew, rounded, rows, Levels{(const uint8_t *)l.packed, l.scales, l.bits}, l.columns, l.depth, tiles, finish);
    if (tiles) tiles_configure();
}

// half 0: keys, 1: values.
template <class T>
static inline void write_head(const Paged &p, int64_t slot, int64_t head, int64_t half, const float *x) {
    const int64_t block = slot / p.block_tokens, offset = slot % p.block_tokens;
    char *page = (char *)p.pages + block * p.block_bytes + (half * p.heads + head) * p.block_tokens * p.dim * sizeof(T);
    T *out = (T *)page + offset * p.dim;
    for (int64_t d = 0; d < p.dim; ++d) narrow(out + d, x[d]);
}

// Heads of one token, one after the other: norm, rotation, and keys and values into the arena.
template <class T> static inline void place_token(const Step &s, const Layer &l, const Paged &p, int64_t t) {
    const int64_t queries = p.heads * p.group, keys = queries + p.heads;
    for (int64_t head = 0; head < keys + p.heads; ++head) {
        float *x = s.projected + t * l.qkv.columns + head * p.dim;
        if (head >= keys) {
            write_head<T>(p, s.slots[t], head - keys, 1, x);
            continue;
        }
        const float *norm = head < queries ? l.query_norm : l.key_norm;
        if (norm) rms_norm(x, norm, l.epsilon, p.dim, x);
        rotate(x, s.cosines + t * s.rotary, s.sines + t * s.rotary, s.rotary);
        if (head >= queries) write_head<T>(p, s.slots[t], head - queries, 0, x);
    }
}

template <class T>
static void attention_half(Crew &crew, const Step &s, const Layer &l, const Paged &p, Scratch &scratch, float *room) {
    T *normed = (T *)s.normed, *attended = (T *)s.attended;
    crew.share(s.num_tokens, [&](int64_t t) {
        rms_norm(s.stream + t * s.hidden, l.before, l.epsilon, s.hidden, normed + t * l.qkv.depth);
    });
    linear(crew, l.qkv, normed, s.num_tokens, s.levels, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        memcpy(s.projected + row * l.qkv.columns + at, c, n * sizeof(float));
    });
    crew.share(s.num_tokens, [&](int64_t t) { place_token<T>(s, l, p, t); });
    attend<T>(
        crew, p, scratch, room,
        [&](int64_t t, int64_t head, float *q) {
            memcpy(q, s.projected + t * l.qkv.columns + head * p.dim, p.dim * sizeof(float));
        },
        [&](int64_t t, int64_t head, const float *sums, float factor) {
            T *out = attended + t * l.out.depth + head * p.dim;
            for (int64_t d = 0; d < p.dim; ++d) narrow(out + d, sums[d] * factor);
        });
    linear(crew, l.out, attended, s.num_tokens, s.levels, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        for (int64_t i = 0; i < n; ++i) s.stream[row * s.hidden + at + i] += c[i];
    });
}

template <class T> static void feed_forward_half(Crew &crew, const Step &s, const Layer &l) {
    T *normed = (T *)s.normed, *active = (T *)s.active;
    crew.share(s.num_tokens, [&](int64_t t) {
        rms_norm(s.stream + t * s.hidden, l.after, l.epsilon, s.hidden, normed + t * l.gate_up.depth);
    });
    linear(crew, l.gate_up, normed, s.num_tokens, s.levels, [&](int64_t row, int64_t at, int64_t, const float *c) {
        T *out = active + row * l.down.depth + at / 2; // one panel: 16 gates, then the 16 they gate
        store(out, vsilu(load(c)) * load(c + 16));
    });
    linear(crew, l.down, active, s.num_tokens, s.levels, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        for (int64_t i = 0; i < n; ++i) s.stream[row * s.hidden + at + i] += c[i];
    });
}

template <class T> static void step(Crew &crew, const Step &s, float *room) {
    static thread_local Scratch scratch;
    T *normed = (T *)s.normed;
    if (s.embedding)
        crew.share(s.num_tokens, [&](int64_t t) {
            const T *from = (const T *)s.embedding + s.tokens[t] * s.hidden;
            for (int64_t i = 0; i < s.hidden; ++i) s.stream[t * s.hidden + i] = widen(from[i]);
        });
    Paged paged = s.paged;
    for (int64_t i = 0; i < s.num_layers; ++i, paged.pages += s.layer_bytes) {
        paged.scaling = s.layers[i].scaling;
        paged.window = s.layers[i].window;
        attention_half<T>(crew, s, s.layers[i], paged, scratch, room);
        feed_forward_half<T>(crew, s, s.layers[i]);
    }
    crew.share(s.num_wanted, [&](int64_t r) {
        rms_norm(s.stream + s.wanted[r] * s.hidden, s.norm, s.epsilon, s.hidden, normed + r * s.head.depth);
    });
    linear(crew, s.head, normed, s.num_wanted, s.levels, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        memcpy(s.logits + row * s.head.columns + at, c, n * sizeof(float));
    });
}

// out [rows][columns] of O = in [rows][k] of T; staged: T [rows padded to 16][depth], zero beyond k.
template <class T, class O>
static void project(Crew &crew, const Linear &l, const T *in, int64_t rows, int64_t k, T *staged, void *levels, O *out) {
    crew.share(rows, [&](int64_t r) { memcpy(staged + r * l.depth, in + r * k, k * sizeof(T)); });
    linear(crew, l, staged, rows, levels, [&](int64_t row, int64_t at, int64_t n, const float *c) {
        O *to = out + row * l.columns + at;
        for (int64_t i = 0; i < n; ++i) narrow(to + i, c[i]);
    });
}

template <class T>
static void attend_tensor(
    Crew &crew, const Paged &p, float *room, const T *queries, int64_t token_stride, int64_t head_stride, T *out) {
    static thread_local Scratch scratch;
    attend<T>(
        crew, p, scratch, room,
        [&](int64_t t, int64_t head, float *q) {
            for (int64_t d = 0; d < p.dim; ++d) q[d] = widen(queries[t * token_stride + head * head_stride + d]);
        },
        [&](int64_t t, int64_t head, const float *sums, float factor) {
            T *to = out + (t * p.heads * p.group + head) * p.dim;
            for (int64_t d = 0; d < p.dim; ++d) narrow(to + d, sums[d] * factor);
        });
}

// Runs work(crew) on `threads` threads of the OpenMP runtime.
template <class Work> static void run(int threads, int64_t phases, Work work) {
    std::vector<Phase> shared(phases);
#pragma omp parallel num_threads(threads)
    {
        Crew crew(shared.data());
        tiles_configure();
        work(crew);
        tiles_release();
    }
}

static int64_t level_floats(const Linear &l, int64_t rows) {
    return l.bits ? Rounded::bytes(round_up(rows, 16), l.depth) / 4 + 1 : 0;
}

// Room for what the threads of one call hand each other; uninitialised.
static std::unique_ptr<float[]> room_of(int64_t floats) { return std::unique_ptr<float[]>(new float[floats]); }

#define FOR_BOTH_TYPES(name, phases, floats, parameters, call)                                                        \
    extern "C" void name##_float32 parameters {                                                                       \
        auto room = room_of(floats);                                                                                  \
        run(threads, phases, [&](Crew &crew) { typedef float T; call; });                                             \
    }                                                                                                                 \
    extern "C" void name##_bfloat16 parameters {                                                                      \
        auto room = room_of(floats);                                                                                  \
        run(threads, phases, [&](Crew &crew) { typedef bf16 T; call; });                                              \
    }

FOR_BOTH_TYPES(step, 14 * s->num_layers + 4, shared_floats(s->paged), (int threads, const Step *s),
    step<T>(crew, *s, room.get()))

FOR_BOTH_TYPES(project, 3, level_floats(*l, rows),
    (int threads, const Linear *l, const void *in, int64_t rows, int64_t k, void *staged, void *out),
    (project<T, T>(crew, *l, (const T *)in, rows, k, (T *)staged, room.get(), (T *)out)))

FOR_BOTH_TYPES(project_wide, 3, level_floats(*l, rows),
    (int threads, const Linear *l, const void *in, int64_t rows, int64_t k, void *staged, float *out),
    (project<T, float>(crew, *l, (const T *)in, rows, k, (T *)staged, room.get(), out)))

FOR_BOTH_TYPES(attend, 2, shared_floats(*p),
    (int threads, const Paged *p, const void *queries, int64_t token_stride, int64_t head_stride, void *out),
    attend_tensor<T>(crew, *p, room.get(), (const T *)queries, token_stride, head_stride, (T *)out))

extern "C" void pack_float32(const float *weight, int64_t rows, int64_t k, float *packed, int64_t group, int64_t stride, int64_t start) {
    pack(weight, rows, k, packed, group, stride, start);
}

extern "C" void pack_bfloat16(const bf16 *weight, int64_t rows, int64_t k, bf16 *packed, int64_t group, int64_t stride, int64_t start) {
    pack(weight, rows, k, packed, group, stride, start);
}

extern "C" void draw_float32(int threads, const float *logits, int64_t stride, const int64_t *rows, int64_t count,
                             int64_t vocabulary, const uint64_t *keys, int64_t *tokens) {
    std::vector<Best> found(2 * count * segments(vocabulary));
    run(threads, 3, [&](Crew &crew) { draw(crew, logits, stride, rows, count, vocabulary, keys, found.data(), tokens); });
}
