// The shapes of a thread's tile registers. Knows the layout the processor reads; refuses to know products.
#pragma once

#include <cstdint>

#ifdef __AMX_TILE__
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {}; // of a row
    uint8_t rows[16] = {};

    void set(int first, int end, int count, int width) {
        for (int i = first; i < end; ++i) rows[i] = count, bytes[i] = width;
    }

    // In assembly, as the compiler's intrinsic says it reads eight bytes, and the rest need not be there yet.
    void load() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
};
#endif
