// What follows a run of tokens: drafts read off a window of texts, and the C interface to it.
//
// Knows: how to walk the window's tree, and how to score a continuation by the counts along it.
// Refuses to know: requests, acceptance, and why somebody asks. cluster/draft/suffix/plain.py answers the same from
// plain dictionaries: the oracle of the tests. No globals: everything hangs on a handle.

#include <algorithm>
#include <cstdint>
#include <new>
#include <queue>
#include <vector>

#include "suffix_window.h"

namespace {

// Where a run of tokens ends: `offset` tokens into the edge of `node`.
struct Place {
    Id node;
    uint32_t offset;
};

struct Draft {
    std::vector<int32_t> tokens, parents;
    std::vector<double> probs;
    double score = 0;
    int match = 0;

    void clear() {
        tokens.clear();
        parents.clear();
        probs.clear();
        score = 0;
    }
};

struct Wish {
    int32_t limit;
    double factor, offset, min_prob;
    int32_t tree;
};

class Trie : public Window {
  public:
    using Window::Window;

    int64_t count(int64_t key, const int32_t* run, int length) const {
        const Place place = find(key, run, length);
        return place.node == NONE ? 0 : passing(place);
    }

    Draft speculate(int64_t key, const int32_t* context, int length, const Wish& wish) {
        Draft best, draft;
        // A draft of full length that nothing contradicts cannot be improved on: a longer run is followed by the same.
        for (int match = 1; match <= std::min(length, depth_ - 1) && best.score < wish.limit; ++match) {
            const Place place = find(key, context + length - match, match);
            if (place.node == NONE || ends(place)) break;  // nor does anything follow a longer run
            const double wanted = wish.factor * match + wish.offset;
            if (wanted < 1) continue;
            const int limit = wanted < wish.limit ? int(wanted) : wish.limit;
            draft.clear();
            if (wish.tree)
                grow(draft, place, limit, wish.min_prob);
            else
                follow(draft, place, limit, wish.min_prob);
            if (draft.tokens.empty() || draft.score < best.score) continue;
            std::swap(best, draft);
            best.match = match;
        }
        return best;
    }

  private:
    Place find(int64_t key, const int32_t* run, int size) const {
        auto root = roots_.find(key);
        Place place{root == roots_.end() ? NONE : root->second, 0};
        for (int done = 0; done < size && place.node != NONE;) {
            place = {child_of(place.node, run[done]), 0};
            if (place.node == NONE) break;
            const Node& node = at(place.node);
            const uint32_t here = std::min(length(node), uint32_t(size - done));
            for (; place.offset < here; ++place.offset, ++done)
                if (text(node.start + place.offset) != run[done]) return {NONE, 0};
            if (done < size && here < node.len) return {NONE, 0};
        }
        return place;
    }

    uint32_t passing(Place place) const {
        const Node& node = at(place.node);
        uint32_t count = node.count;
        if (node.cursors && place.offset < node.len)
            for (const Cursor& cursor : cursors_) count += cursor.node == place.node && cursor.offset >= place.offset;
        return count;
    }

    bool ends(Place place) const {
        const Node& node = at(place.node);
        return place.offset < node.len ? place.offset >= length(node) : node.child == NONE;
    }

    // The likeliest token after `place`, as the place it leads to.
    Place onward(Place place) {
        if (place.offset < at(place.node).len) return {place.node, place.offset + 1};
        return {best_of(place.node), 1};
    }

    void follow(Draft& draft, Place place, int limit, double min_prob) {
        double prob = 1;
        for (int size = 0; size < limit && !ends(place); ++size) {
            const Place next = onward(place);
            prob *= double(passing(next)) / double(passing(place));
            if (prob < min_prob) break;
            emit(draft, next, size - 1, prob);
            place = next;
        }
    }

    void emit(Draft& draft, Place place, int parent, double prob) const {
        draft.tokens.push_back(text(at(place.node).start + place.offset - 1));
        draft.parents.push_back(parent);
        draft.probs.push_back(prob);
        draft.score += prob;
    }

    struct Branch {
        double prob;
        int born, parent;
        Place place;
        bool operator<(const Branch& other) const {
            return prob != other.prob ? prob < other.prob : born > other.born;
        }
    };

    void grow(Draft& draft, Place place, int limit, double min_prob) {
        std::priority_queue<Branch> heap;
        int born = 0, parent = -1;
        double prob = 1;
        while (int(draft.tokens.size()) < limit) {
            for (const Place& next : branches(place, limit - int(draft.tokens.size()))) {
                const double then = prob * (double(passing(next)) / double(passing(place)));
                if (then >= min_prob) heap.push({then, born++, parent, next});
            }
            if (heap.empty()) break;
            const Branch top = heap.top();
            heap.pop();
            parent = int(draft.tokens.size());
            emit(draft, top.place, top.parent, top.prob);
            place = top.place;
            prob = top.prob;
        }
    }

    // At most `limit` tokens that follow `place`, the most frequent first, the newer of equals first.
    std::vector<Place> branches(Place place, int limit) {
        if (ends(place)) return {};
        if (limit == 1 || place.offset < at(place.node).len) return {onward(place)};
        std::vector<Place> found;
        for (Id child = at(place.node).child; child != NONE; child = at(child).next) found.push_back({child, 1});
        std::stable_sort(found.begin(), found.end(), [this](const Place& one, const Place& other) {
            return entered(at(one.node)) > entered(at(other.node));
        });
        if (int(found.size()) > limit) found.resize(size_t(limit));
        return found;
    }
};


}  // namespace

extern "C" {

// Calls that may need memory return -1 when there is none; the trie must then be destroyed.

void* trie_create(int32_t depth, int64_t capacity, int64_t sequences) noexcept {
    try {
        return new Trie(depth, uint32_t(capacity), uint32_t(sequences));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void trie_destroy(void* trie) noexcept { delete static_cast<Trie*>(trie); }

int32_t trie_start(void* trie, int64_t key) noexcept {
    try {
        static_cast<Trie*>(trie)->start(key);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int32_t trie_append(void* trie, const int32_t* tokens, int64_t size) noexcept {
    try {
        for (int64_t at = 0; at < size; ++at) static_cast<Trie*>(trie)->append(tokens[at]);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int32_t trie_stop(void* trie) noexcept {
    try {
        static_cast<Trie*>(trie)->stop();
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Tokens written, at most wish.limit; `score` and `match` say how good and by how long a match.
int32_t trie_speculate(void* trie, int64_t key, const int32_t* context, int32_t size, const Wish* wish, int32_t* tokens,
                       int32_t* parents, double* probs, double* score, int32_t* match) noexcept {
    try {
        const Draft draft = static_cast<Trie*>(trie)->speculate(key, context, size, *wish);
        std::copy(draft.tokens.begin(), draft.tokens.end(), tokens);
        std::copy(draft.parents.begin(), draft.parents.end(), parents);
        std::copy(draft.probs.begin(), draft.probs.end(), probs);
        *score = draft.score;
        *match = draft.match;
        return int32_t(draft.tokens.size());
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int64_t trie_count(const void* trie, int64_t key, const int32_t* run, int32_t size) noexcept {
    return static_cast<const Trie*>(trie)->count(key, run, size);
}

int32_t trie_has(const void* trie, int64_t key) noexcept { return static_cast<const Trie*>(trie)->has(key); }

// Tokens, sequences, keys, nodes, bytes.
void trie_sizes(const void* trie, int64_t* out) noexcept { static_cast<const Trie*>(trie)->sizes(out); }
}
