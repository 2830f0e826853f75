// A window over texts, indexed by every run of at most `depth` tokens that occurs in it.
//
// Knows: how often each run occurs, and which token followed it most often.
// Refuses to know: requests, acceptance, and why somebody asks. cluster/draft/suffix/plain.py does the same with
// plain dictionaries.
//
// The structure is a suffix tree cut at `depth`, one root a key, edges pointing into a ring of tokens:
//
//     ring    [ .. a b c a b d .. ]          node   edge = ring[start, start + len), `count` runs pass its end
//                    ^first     ^end         leaf   a run seen once: it grows with the text, at no cost
//
// Text enters at `end`. Each of its suffixes is a cursor while it repeats what is known, and becomes a leaf where it
// stops doing so; suffixes stop in order of age, so the living cursors are a queue of at most `depth`. Between nodes a
// cursor counts only above itself: an edge carries how many cursors are on it. Text leaves at `first`, one
// suffix at a time: its path loses one each, empty nodes go, and a node whose only child has its count joins it. Every
// passage re-points an edge to the newest text, so no edge ever points before `first`.
//
// Siblings are listed newest passage first. `best` is the most frequent child, the newer of equals.

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "suffix_nodes.h"

namespace {

struct Cursor {
    Id node;
    uint32_t offset;  // tokens of the edge behind it, 1 .. len (0 at a root)
};

struct Sequence {
    uint32_t start, end;
    int64_t key;
};

class Window : protected Nodes {
  public:
    Window(int depth, uint32_t capacity, uint32_t sequences)
        : depth_(depth), capacity_(capacity), most_(sequences), open_(256, NONE), ring_(256) {}

    void start(int64_t key) {
        while (sequences_.size() >= most_) drop();
        auto found = roots_.find(key);
        root_ = found != roots_.end() ? found->second : (roots_[key] = make(NONE, -1, 0, 0, 0));
        sequences_.push_back({end_, end_, key});
        active_ = true;
    }

    void append(int32_t token) {
        if (end_ - first_ == capacity_) evict();
        if (end_ - first_ == ring_.size()) widen();
        ring_[end_ & (ring_.size() - 1)] = token;
        sequences_.back().end = ++end_;
        cursors_.push_back({root_, 0});
        size_t done = 0;  // cursors end oldest first
        for (size_t at = 0; at < cursors_.size(); ++at) done += !advance(cursors_[at], uint32_t(cursors_.size() - at), token);
        cursors_.erase(cursors_.begin(), cursors_.begin() + done);
    }

    void stop() {
        const uint32_t length = end_ - sequences_.back().start, waiting = uint32_t(cursors_.size());
        for (uint32_t back = std::min(length, uint32_t(depth_) - 1); back > waiting; --back) {
            Node& leaf = at(open_[(end_ - back) % open_.size()]);
            leaf.depth -= leaf.len - uint8_t(end_ - leaf.start);
            leaf.len = uint8_t(end_ - leaf.start);
        }
        while (!cursors_.empty()) {
            const Cursor cursor = cursors_.front();
            if (cursor.offset < at(cursor.node).len) split(cursor.node, cursor.offset, end_);
            cursors_.pop_front();
        }
        active_ = false;
        if (length == 0) close_front_if_empty(sequences_.size() - 1);
    }

    // Forget the oldest sequence; it must have stopped.
    void drop() {
        const size_t before = sequences_.size();
        while (sequences_.size() == before) evict();
    }

    bool active() const { return active_; }
    bool has(int64_t key) const { return roots_.count(key) > 0; }

    void sizes(int64_t* out) const {
        out[0] = end_ - first_;
        out[1] = int64_t(sequences_.size());
        out[2] = int64_t(roots_.size());
        out[3] = int64_t(live());
        out[4] = int64_t(bytes() + ring_.size() * sizeof(int32_t) + sizeof(Window));
    }

  protected:
    int32_t text(uint32_t position) const { return ring_[position & (ring_.size() - 1)]; }
    // Tokens of the edge that exist: a leaf of the text now entering is as long as it may become.
    uint32_t length(const Node& node) const { return std::min(uint32_t(node.len), end_ - node.start); }

    const int depth_;
    std::deque<Cursor> cursors_;
    std::unordered_map<int64_t, Id> roots_;

  private:
    // ---- text entering ---------------------------------------------------------------------------------------------

    // Take a cursor over `token`; false when its suffix is at home: a leaf of its own, or `depth` long.
    bool advance(Cursor& cursor, uint32_t depth, int32_t token) {
        Node& node = at(cursor.node);
        if (cursor.offset < node.len) {
            if (text(node.start + cursor.offset) != token) {
                sprout(split(cursor.node, cursor.offset, end_ - 1), depth, token);
                return false;
            }
            if (++cursor.offset == node.len) {
                --node.cursors;
                arrive(node);
            }
            return depth < uint32_t(depth_);
        }
        const Id child = child_of(cursor.node, token);
        if (child == NONE) {
            sprout(cursor.node, depth, token);
            return false;
        }
        pass_into(child);
        cursor = {child, 1};
        return depth < uint32_t(depth_);
    }

    void arrive(Node& node) {
        ++node.count;
        node.start = end_ - node.len;
    }

    void pass_into(Id id) {
        Node& node = at(id);
        if (node.len == 1)
            arrive(node);
        else
            ++node.cursors;
        if (node.prev != NONE) {
            unlink(id);
            link_first(id);
        }
        prefer(id);
    }

    // A passage into `id` may have made it its parent's best.
    void prefer(Id id) {
        Node& parent = at(at(id).parent);
        if (parent.best != NONE && entered(at(id)) >= entered(at(parent.best))) parent.best = id;
        if (parent.best == NONE && parent.child == id && at(id).next == NONE) parent.best = id;
    }

    // The newest token, `depth` deep, starts a leaf under `parent`.
    void sprout(Id parent, uint32_t depth, int32_t token) {
        Node& node = at(parent);
        Id leaf = parent;
        if (node.parent != NONE && node.child == NONE && node.count == 1) {
            // Only this very suffix passes here (the text it repeated was evicted): the node itself is its leaf.
            node.start = end_ - 1 - node.len;
            node.len = uint8_t(node.len + depth_ - node.depth);
            node.depth = uint8_t(depth_);
        } else {
            leaf = make(parent, token, end_ - 1, uint8_t(depth_ - depth + 1), uint8_t(depth_));
            at(leaf).count = 1;
            adopt(leaf);
            prefer(leaf);
        }
        open_[(end_ - depth) % open_.size()] = leaf;
    }

    // End the edge of `id` after `offset` tokens, where the oldest cursor on it stands, its text up to `stand`; returns
    // the new node.
    Id split(Id id, uint32_t offset, uint32_t stand) {
        const Node old = at(id);
        const Id upper = make(old.parent, old.token, old.start, uint8_t(offset), uint8_t(old.depth - old.len + offset));
        replace(id, upper);
        Node &above = at(upper), &below = at(id);
        // The cursor counts as having passed; younger ones stand before it, on the upper edge.
        above.count = old.count + 1;
        above.cursors = uint8_t(old.cursors - 1);
        above.child = above.best = id;
        below.parent = upper;
        below.prev = below.next = NONE;
        below.start += offset;
        below.len = uint8_t(old.len - offset);
        below.cursors = 0;
        below.token = text(below.start);
        for (Cursor& cursor : cursors_)
            if (cursor.node == id && cursor.offset <= offset) cursor.node = upper;
        above.start = stand - offset;
        return upper;
    }

    // ---- text leaving ----------------------------------------------------------------------------------------------

    void evict() {
        Sequence& oldest = sequences_.front();
        if (oldest.start != oldest.end) {
            const uint32_t length = std::min(oldest.end - oldest.start, uint32_t(depth_));
            Id path[256];
            int nodes = 0;
            Id node = roots_.at(oldest.key);
            for (uint32_t done = 0; done < length; done += at(node).len) {
                node = child_of(node, text(first_ + done));
                path[nodes++] = node;
            }
            while (nodes > 0) lessen(path[--nodes]);
            ++first_;
            ++oldest.start;
        }
        close_front_if_empty(0);
    }

    void close_front_if_empty(size_t index) {
        const Sequence sequence = sequences_[index];
        if (sequence.start != sequence.end || (active_ && index + 1 == sequences_.size())) return;
        sequences_.erase(sequences_.begin() + long(index));
        const Id root = roots_.at(sequence.key);
        if (at(root).child == NONE && !(active_ && root == root_)) {
            roots_.erase(sequence.key);
            discard(root);
        }
    }

    // One suffix fewer passes `id`.
    void lessen(Id id) {
        Node& node = at(id);
        --node.count;
        if (at(node.parent).best == id) at(node.parent).best = NONE;
        if (node.count == 0 && node.cursors == 0) {
            remove(id);
        } else if (node.count == 0) {
            retreat(id);
        } else if (node.child != NONE && at(node.child).next == NONE && at(node.child).count == node.count) {
            join(id, node.child);
        }
    }

    // Nothing passes the end of the edge any more: it ends where its oldest cursor stands.
    void retreat(Id id) {
        Node& node = at(id);
        uint32_t offset = 0;
        for (const Cursor& cursor : cursors_)
            if (cursor.node == id) offset = std::max(offset, cursor.offset);
        node.depth = uint8_t(node.depth - node.len + offset);
        node.len = uint8_t(offset);
        node.start = end_ - offset;
        node.count = 1;
        --node.cursors;
    }

    // The lower edge swallows the upper one: what passes one passes the other.
    void join(Id upper, Id lower) {
        const Node above = at(upper);
        if (above.hashed) leave(upper, at(lower).token);
        replace(upper, lower);
        Node& node = at(lower);
        node.start -= above.len;
        node.len = uint8_t(node.len + above.len);
        node.cursors = above.cursors;
        for (Cursor& cursor : cursors_) {
            if (cursor.node == lower) cursor.offset += above.len;  // it stands at the end
            if (cursor.node == upper) cursor.node = lower;
        }
        discard(upper);
    }

    void widen() {
        std::vector<int32_t> wider(ring_.size() * 2);
        for (uint32_t position = first_; position != end_; ++position) wider[position & (wider.size() - 1)] = text(position);
        ring_.swap(wider);
    }

    const uint32_t capacity_, most_;
    Id root_ = NONE;
    uint32_t first_ = 0, end_ = 0;
    bool active_ = false;
    std::deque<Sequence> sequences_;
    std::vector<Id> open_;  // leaf of the suffix that starts at a position, by the last byte of the position
    std::vector<int32_t> ring_;
};

}  // namespace
