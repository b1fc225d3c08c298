// Many rows times 4-bit weights at the speed of the matrix units; the weights' layout is drawn in int4.py, the way of the
// work in tiles.cuh. Weights become halves in registers, those of 16 inputs while the matrix unit works on those before.
//
// Compile-time, beside what tiles.cuh has: GROUPS a unit of 128 inputs.

#include "tiles.cuh"

static constexpr int DEPTH = 8; // products of 16 inputs under way
static constexpr int BATCH = 4; // of them sent at once: what comes before each sending keeps the matrix unit waiting
static constexpr int HALF_BYTES = NT * 8 * 128; // activations: two halves of 64 inputs, swizzled by the copy engine
static constexpr int X_BYTES = 2 * HALF_BYTES;
static constexpr int SCALE_BYTES = BLOCKS * GROUPS * 512;

static constexpr u32 EXPONENT = IS_BF16 ? 0x43004300u : 0x64006400u; // of 128 or 1024, twice

// Of a stage: codes, activations (at a multiple of 1024, as the swizzle goes by address), scales.
struct Halves : Problem {
    static constexpr int STAGE_BYTES = (CODE_BYTES + X_BYTES + SCALE_BYTES + 1023) / 1024 * 1024;
    static constexpr int COPIER_REGISTERS = 40, TEAM_REGISTERS = 232;
};

// Announce a stage's bytes and send for its weights.
DEVICE void copy_weights(const Halves &p, u8 *stage, u64 *filled, const Cursor &at, bool) {
    barrier_arrive_expect(filled, CODE_BYTES + X_BYTES + SCALE_BYTES);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const size_t unit = static_cast<size_t>(min(at.block(p) + b, p.B - 1)) * p.U + at.u;
        copy_bulk(stage + b * BLOCK_BYTES, p.codes + unit * BLOCK_BYTES, BLOCK_BYTES, filled);
        copy_bulk(stage + CODE_BYTES + X_BYTES + b * GROUPS * 512, p.scales + unit * (GROUPS * 512), GROUPS * 512, filled);
    }
}

DEVICE void copy_x(const Halves &p, u8 *stage, u64 *filled, const Cursor &at, bool) {
    copy_box(stage + CODE_BYTES, &p.x, at.u * 128, at.x_row(p), filled);
    copy_box(stage + CODE_BYTES + HALF_BYTES, &p.x, at.u * 128 + 64, at.x_row(p), filled);
}

// The scales and zero points of rows g and g + 8 in one group, everything twice in a word.
struct Scale {
    u32 factor[2], zero[2];
    DEVICE void set(u64 pair) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 word = static_cast<u32>(pair >> (32 * h));
            const float scale = __uint_as_float(word & ~15u);
            factor[h] = round_pair(scale, scale);
            zero[h] = (word & 15u) * 0x00010001u | EXPONENT;
        }
    }
};

// The four pairs of one word, rows g, g + 8, g, g + 8, as halves.
DEVICE void unpack(u32 (&a)[4], u32 word, const Scale &scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 code = subtract_pair(select(word >> (4 * i), 0x000F000Fu, EXPONENT), scale.zero[i & 1]);
        a[i] = multiply_pair(code, scale.factor[i & 1]);
    }
}

// Weights have their scales, activations none.
DEVICE void scale_box(const Halves &, float (&)[BOX_TILES][4], int) {}

// Of a warpgroup: its sums, and weights of the products under way.
struct Team {
    float acc[RT][NT][4];
    u32 a[DEPTH][4];

    DEVICE void begin() { clear(acc); }

    // Multiply a unit. On return its last products may still be under way; the stage before, unless -1, has been left.
    DEVICE void multiply(const Halves &, const u8 *stage, Control &control, int before, const Cursor &, bool) {
        const int team = threadIdx.x / TEAM_THREADS, warp = threadIdx.x / 32 % TEAM_WARPS, lane = threadIdx.x % 32;
        const u8 *codes = stage + team * (RT * 4 * TILE_BYTES) + warp * TILE_BYTES + lane * 16;
        const u8 *scales = stage + CODE_BYTES + X_BYTES + warp * 64 + lane / 4 * 8;
        const u32 x = describe(stage + CODE_BYTES);
        // All at once and ahead of use, or every product would wait for shared memory.
        Words words[RT][2]; // of 64 inputs each
        u64 pairs[RT][GROUPS];
#pragma unroll
        for (int rt = 0; rt < RT; rt++) {
            const int rows = team * RT + rt; // 64 of them
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                pairs[rt][g] = *reinterpret_cast<const u64 *>(scales + (rows / 2 * GROUPS + g) * 512 + rows % 2 * 256);
#pragma unroll
            for (int half = 0; half < 2; half++)
                words[rt][half] = *reinterpret_cast<const Words *>(codes + rt * (4 * TILE_BYTES) + half * 512);
        }
        Scale scale;
#pragma unroll
        for (int first = 0; first < 8 * RT; first += BATCH) {
#pragma unroll
            for (int step = first; step < first + BATCH; step++) {
                const int rt = step / 8, at = step % 8; // 16 inputs each
                if (at % (8 / GROUPS) == 0) scale.set(pairs[rt][at / (8 / GROUPS)]);
                unpack(a[step % DEPTH], words[rt][at / 4].at[at % 4], scale);
            }
            group_begin();
#pragma unroll
            for (int step = first; step < first + BATCH; step++) {
                const int at = step % 8;
                multiply_group(acc[step / 8], a[step % DEPTH], x + (at / 4 * HALF_BYTES + at % 4 * 32 >> 4));
            }
            group_commit();
            group_wait<DEPTH / BATCH - 1>();
            if (first == DEPTH - 2 * BATCH) leave(control, max(before, 0), before >= 0);
        }
    }

    DEVICE void finish() {
        group_wait<0>();
        settle(acc);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) int4_many(const __grid_constant__ Halves p) { run<Halves, Team>(p); }
