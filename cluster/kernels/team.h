// How the threads of one call share its work: phase after phase, unit by unit.
//
// Knows: who takes which unit, and when a phase is over. Refuses to know: what a unit is.
//
// A phase is over when its units are done, not when every thread has come by: a thread that the
// system has put aside holds up the others only by the unit it had begun. On a busy machine a
// barrier a phase would cost a time slice each.
#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
};

// One thread's walk through the phases; every thread makes the same calls in the same order.
class Crew {
  public:
    explicit Crew(Phase *first) : phase(first) {}

    // Runs work(unit) once for each unit, over all threads, and returns when all are done.
    template <class Work> void share(int64_t units, Work work) {
        int64_t mine = 0;
        for (int64_t unit; (unit = phase->next.fetch_add(1, std::memory_order_relaxed)) < units; ++mine) work(unit);
        phase->done.fetch_add(mine, std::memory_order_acq_rel);
        for (int spins = 0; phase->done.load(std::memory_order_acquire) < units; ++spins)
            if (spins > 4096) sched_yield();
            else pause();
        ++phase;
    }

  private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    Phase *phase;
};
