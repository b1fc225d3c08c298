// Many rows of 8-bit floats (e4m3) times 4-bit weights; the weights' layout is drawn in int4.py, the way of the work in
// tiles.cuh. Activations come rounded by quantize_fp8.cu, each row with its factor, in the order in which a lane's codes lie.
//
// A code is its own 8-bit float: the bytes 0 to 15 of e4m3 are the numbers 0/512 to 15/512, subnormals and the first binade
// being one straight line. So codes need but be parted into bytes, and the matrix unit multiplies them exactly. It keeps some
// 14 bits of its sums; those of 128 inputs, the least that have a scale of their own, are therefore added up outside:
//
//     y[n] = (sum over units of scale * part) + (sum over units of (-scale * zero / 512) * (the row's sum of 128 inputs))
//
// The second is a product too, with an input a unit: the matrix unit takes it eight units at a time, in tf32. Outside it
// would cost as many additions as the first, a fifth of the whole.

#include "tiles.cuh"

static constexpr int STEPS = 4;              // products of 32 inputs in a unit
static constexpr int OCTET = 8;              // units whose zero points are taken off at once
static constexpr int X_BYTES = NT * 8 * 128; // swizzled by the copy engine
static constexpr int SCALE_BYTES = BLOCKS * 512;
static constexpr int SUM_BYTES = NT * 8 * OCTET * 4;

// Of a stage: codes, activations (at a multiple of 1024, as the swizzle goes by address), scales, an octet's sums.
struct Bytes : Problem {
    const float *sums;    // (octets, stride / 8, 2, 8, 4): of row 8 i + j and unit 4 h + k at (i, h, j, k)
    const float *factors; // (stride,)
    int stride;           // rows, padded
    static constexpr int STAGE_BYTES = (CODE_BYTES + X_BYTES + SCALE_BYTES + SUM_BYTES + 1023) / 1024 * 1024;
    static constexpr int COPIER_REGISTERS = 24, TEAM_REGISTERS = 240;
};

// Whether zero points are taken off after this unit: an octet ends, or the thread block's part of it.
DEVICE bool ends(const Bytes &p, const Cursor &at, bool is_last) {
    return is_last || at.u % OCTET == OCTET - 1 || at.u == p.U - 1;
}

// Announce a stage's bytes and send for its weights.
DEVICE void copy_weights(const Bytes &p, u8 *stage, u64 *filled, const Cursor &at, bool is_last) {
    barrier_arrive_expect(filled, CODE_BYTES + X_BYTES + SCALE_BYTES + (ends(p, at, is_last) ? SUM_BYTES : 0));
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const size_t unit = static_cast<size_t>(min(at.block(p) + b, p.B - 1)) * p.U + at.u;
        copy_bulk(stage + b * BLOCK_BYTES, p.codes + unit * BLOCK_BYTES, BLOCK_BYTES, filled);
        copy_bulk(stage + CODE_BYTES + X_BYTES + b * 512, p.scales + unit * 512, 512, filled);
    }
}

DEVICE void copy_x(const Bytes &p, u8 *stage, u64 *filled, const Cursor &at, bool is_last) {
    copy_box(stage + CODE_BYTES, &p.x, at.u * 128, at.x_row(p), filled);
    if (!ends(p, at, is_last)) return;
    const float *sums = p.sums + (static_cast<size_t>(at.u / OCTET) * p.stride + at.x_row(p)) * OCTET;
    copy_bulk(stage + CODE_BYTES + X_BYTES + SCALE_BYTES, sums, SUM_BYTES, filled);
}

// Two words, each of 16 inputs: four bytes for row g, four for row g + 8.
DEVICE void unpack(u32 (&a)[4], u32 low, u32 high) {
    a[0] = low & 0x0F0F0F0Fu, a[1] = low >> 4 & 0x0F0F0F0Fu;
    a[2] = high & 0x0F0F0F0Fu, a[3] = high >> 4 & 0x0F0F0F0Fu;
}

// Undo what activations were divided by.
DEVICE void scale_box(const Bytes &p, float (&sums)[BOX_TILES][4], int x_row) {
    const float *factors = p.factors + x_row + threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < BOX_TILES; nt++) {
        const float even = 512.0f * factors[nt * 8], odd = 512.0f * factors[nt * 8 + 1];
        sums[nt][0] *= even, sums[nt][1] *= odd;
        sums[nt][2] *= even, sums[nt][3] *= odd;
    }
}

// Of a warpgroup: its sums, those of a unit, weights, and the second product's first operand: of unit 4 i + t of the octet,
// for lane t of four, rows g and g + 8.
struct Team {
    float acc[RT][NT][4];
    float part[NT][4];
    u32 a[STEPS][4];
    float offsets[RT][4];

    DEVICE void begin() { clear(acc), forget_offsets(); }

    DEVICE void forget_offsets() { clear(offsets); }

    // Multiply a unit; its stage is left with the next, or at the end. Were products under way on return, the compiler would
    // not see that the sums read meanwhile are others, and wait after every product.
    DEVICE void multiply(const Bytes &p, const u8 *stage, Control &control, int before, const Cursor &at, bool is_last) {
        leave(control, max(before, 0), before >= 0);
        const int team = threadIdx.x / TEAM_THREADS, warp = threadIdx.x / 32 % TEAM_WARPS, lane = threadIdx.x % 32;
        const u8 *codes = stage + team * (RT * 4 * TILE_BYTES) + warp * TILE_BYTES + lane * 16;
        const u8 *scales = stage + CODE_BYTES + X_BYTES + warp * 64 + lane / 4 * 8;
        const u32 x = describe(stage + CODE_BYTES);
#pragma unroll
        for (int rt = 0; rt < RT; rt++) {
            const int rows = team * RT + rt; // 64 of them
            const u64 pair = *reinterpret_cast<const u64 *>(scales + rows / 2 * 512 + rows % 2 * 256);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Words words = *reinterpret_cast<const Words *>(codes + rt * (4 * TILE_BYTES) + half * 512);
                unpack(a[half * 2], words.at[0], words.at[1]);
                unpack(a[half * 2 + 1], words.at[2], words.at[3]);
            }
            group_begin();
            multiply_bytes<false>(part, a[0], x);
#pragma unroll
            for (int step = 1; step < STEPS; step++) multiply_bytes<true>(part, a[step], x + (step * 32 >> 4));
            group_commit();
            float factor[2];
            const int turn = at.u % OCTET - lane % 4; // 0 or 4 where this lane's is the unit
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 word = static_cast<u32>(pair >> (32 * h));
                factor[h] = __uint_as_float(word & ~15u);
                const float offset = factor[h] * (static_cast<float>(word & 15u) * (-1.0f / 512.0f));
                if (turn == 0) offsets[rt][h] = offset;
                if (turn == 4) offsets[rt][2 + h] = offset;
            }
            group_wait<0>();
            settle(part);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[rt][nt][i] += factor[i / 2] * part[nt][i];
        }
        // The compiler takes what lane 0 says as the same for a warp.
        if (__shfl_sync(~0u, ends(p, at, is_last), 0)) take_zeros_off(stage);
    }

    DEVICE void take_zeros_off(const u8 *stage) {
        const u32 sums = describe_blocks(stage + CODE_BYTES + X_BYTES + SCALE_BYTES);
#pragma unroll
        for (int rt = 0; rt < RT; rt++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[rt][i] = round_tf32(offsets[rt][i]);
        group_begin();
#pragma unroll
        for (int rt = 0; rt < RT; rt++) multiply_floats(acc[rt], a[rt], sums);
        group_commit();
        group_wait<0>();
        settle(acc);
        forget_offsets();
    }

    DEVICE void finish() {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) int4_fp8(const __grid_constant__ Bytes p) { run<Bytes, Team>(p); }
