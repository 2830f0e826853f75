// Nodes of a suffix tree: siblings in order, children by token.
//
// Knows: where a node lies, who its neighbours are, how a child is found.
// Refuses to know: text, and what a count means.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

using Id = uint32_t;
constexpr Id NONE = 0xffffffffu;
constexpr int HASH_FROM = 6;  // children a node has before they are found by hash instead of by walking the list

struct Node {
    uint32_t start, count;
    Id parent, child, next, prev, best;
    int32_t token;  // first of the edge
    uint8_t len, depth, cursors;
    bool hashed;
};
static_assert(sizeof(Node) == 36, "memory a token is what this structure is about");

class Nodes {
  public:
    Nodes() = default;
    Nodes(const Nodes&) = delete;
    Nodes& operator=(const Nodes&) = delete;
    ~Nodes() { std::free(nodes_); }

    size_t live() const { return used_ - idle_; }
    size_t bytes() const { return room_ * sizeof(Node) + slots_.size() * sizeof(Id); }

  protected:
    Node& at(Id id) { return nodes_[id]; }
    const Node& at(Id id) const { return nodes_[id]; }
    static uint32_t entered(const Node& node) { return node.count + node.cursors; }

    Id make(Id parent, int32_t token, uint32_t start, uint8_t len, uint8_t depth) {
        Id id = free_;
        if (id != NONE) {
            free_ = at(id).next;
            --idle_;
        } else {
            if (used_ == room_) {
                const size_t room = room_ + std::max<size_t>(room_ / 4, 256);
                void* moved = room < NONE ? std::realloc(nodes_, room * sizeof(Node)) : nullptr;
                if (!moved) throw std::bad_alloc();
                nodes_ = static_cast<Node*>(moved);
                room_ = room;
            }
            id = Id(used_++);
        }
        at(id) = {start, 0, parent, NONE, NONE, NONE, NONE, token, len, depth, 0, false};
        return id;
    }

    void discard(Id id) {
        at(id).next = free_;
        free_ = id;
        ++idle_;
    }

    Id child_of(Id parent, int32_t token) const {
        if (at(parent).hashed) return slots_[slot_of(parent, token)];
        Id child = at(parent).child;
        while (child != NONE && at(child).token != token) child = at(child).next;
        return child;
    }

    void link_first(Id id) {
        Node &node = at(id), &parent = at(node.parent);
        node.prev = NONE;
        node.next = parent.child;
        if (node.next != NONE) at(node.next).prev = id;
        parent.child = id;
    }

    void unlink(Id id) {
        const Node& node = at(id);
        (node.prev == NONE ? at(node.parent).child : at(node.prev).next) = node.next;
        if (node.next != NONE) at(node.next).prev = node.prev;
    }

    // `id` takes the place of its sibling-to-be `old` under old's parent.
    void replace(Id old, Id id) {
        const Node gone = at(old);
        Node& node = at(id);
        node.parent = gone.parent;
        node.prev = gone.prev;
        node.next = gone.next;
        node.token = gone.token;
        (gone.prev == NONE ? at(gone.parent).child : at(gone.prev).next) = id;
        if (gone.next != NONE) at(gone.next).prev = id;
        if (at(gone.parent).best == old) at(gone.parent).best = id;
        if (at(gone.parent).hashed) slots_[slot_of(gone.parent, gone.token)] = id;
    }

    void adopt(Id id) {
        const Id parent = at(id).parent;
        link_first(id);
        if (at(parent).hashed) {
            enter(id);
            return;
        }
        int children = 0;
        for (Id child = at(parent).child; child != NONE && children < HASH_FROM; child = at(child).next) ++children;
        if (children < HASH_FROM) return;
        at(parent).hashed = true;
        for (Id child = at(parent).child; child != NONE; child = at(child).next) enter(child);
    }

    static size_t mix(Id parent, int32_t token) {
        uint64_t key = (uint64_t(parent) << 32 | uint32_t(token)) * 0x9e3779b97f4a7c15ull;
        return size_t(key ^ key >> 29);
    }

    // The slot of a child, or the empty one where it would go.
    size_t slot_of(Id parent, int32_t token) const {
        const size_t mask = slots_.size() - 1;
        size_t slot = mix(parent, token) & mask;
        while (slots_[slot] != NONE && (at(slots_[slot]).parent != parent || at(slots_[slot]).token != token))
            slot = (slot + 1) & mask;
        return slot;
    }

    void enter(Id id) {
        if (++filled_ * 4 > slots_.size() * 3) {
            std::vector<Id> old(slots_.size() * 2, NONE);
            old.swap(slots_);
            for (Id other : old)
                if (other != NONE) slots_[slot_of(at(other).parent, at(other).token)] = other;
        }
        slots_[slot_of(at(id).parent, at(id).token)] = id;
    }

    void leave(Id parent, int32_t token) {
        const size_t mask = slots_.size() - 1;
        size_t hole = slot_of(parent, token);
        for (size_t slot = (hole + 1) & mask; slots_[slot] != NONE; slot = (slot + 1) & mask) {
            const size_t home = mix(at(slots_[slot]).parent, at(slots_[slot]).token) & mask;
            if (((slot - home) & mask) < ((slot - hole) & mask)) continue;
            slots_[hole] = slots_[slot];
            hole = slot;
        }
        slots_[hole] = NONE;
        --filled_;
    }

    void remove(Id id) {
        Node& parent = at(at(id).parent);
        if (parent.hashed) leave(at(id).parent, at(id).token);
        unlink(id);
        if (parent.best == id) parent.best = NONE;
        if (parent.child == NONE) parent.hashed = false;
        discard(id);
    }

    Id best_of(Id id) {
        Node& node = at(id);
        if (node.best == NONE)  // an eviction took from the best: look again
            for (Id child = node.child; child != NONE; child = at(child).next)
                if (node.best == NONE || entered(at(child)) > entered(at(node.best))) node.best = child;
        return node.best;
    }

  private:
    Node* nodes_ = nullptr;
    size_t used_ = 0, room_ = 0, idle_ = 0;
    Id free_ = NONE;
    std::vector<Id> slots_ = std::vector<Id>(64, NONE);
    size_t filled_ = 0;
};

}  // namespace
