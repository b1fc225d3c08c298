// Rounds each row of halves to 8-bit floats (e4m3) by its own largest magnitude, for int4_fp8.cu: inputs in the order in
// which a lane's codes lie, and beside them the sum of every 128 rounded inputs and the row's factor.
//
// One thread block a row, read once. Compile-time: CHUNKS of 16 inputs a thread holds, IS_BF16.

struct Rows {
    const u16 *x;   // (rows, K)
    u8 *data;       // (rows, 128 U), past K zeros; of 16 inputs, 2t, 2t + 8, 2t + 1 and 2t + 9 lie at 4t
    float *sums;    // (U / 8, stride / 8, 2, 8, 4), U rounded up: of row 8 i + j and unit 4 h + k at (i, h, j, k)
    float *factors; // (stride,)
    int K, U, stride;
    float largest, least; // of the format; of a row's magnitude
};

DEVICE float largest_of(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// Of all threads; `room` holds a float for each warp.
DEVICE float largest_of_block(float value, float *room) {
    value = largest_of(value);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    return largest_of(threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0.0f);
}

DEVICE u32 round_bytes(float low, float high) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
}

DEVICE float sum_bytes(u32 word) {
    float sum = 0.0f;
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(word >> (16 * pair))));
        float low, high;
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
            : "=f"(low), "=f"(high)
            : "r"(halves));
        sum += low + high;
    }
    return sum;
}

extern "C" __global__ void quantize_fp8(const Rows p) {
    __shared__ float room[32];
    release_dependents();
    wait_for_inputs();
    const int row = blockIdx.x;
    const u16 *x = p.x + static_cast<size_t>(row) * p.K;
    u32 halves[CHUNKS][8];
    float largest = p.least;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int first = (c * blockDim.x + threadIdx.x) * 16;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            Words words = {};
            if (first + 8 * part < p.K) words = *reinterpret_cast<const Words *>(x + first + 8 * part);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                halves[c][4 * part + i] = words.at[i];
                largest = fmaxf(largest, fmaxf(fabsf(widen(words.at[i] & 0xFFFFu)), fabsf(widen(words.at[i] >> 16))));
            }
        }
    }
    largest = largest_of_block(largest, room);
    if (threadIdx.x == 0) p.factors[row] = largest / p.largest;
    const float inverse = p.largest / largest;
    float *sums = p.sums + row / 8 * 64 + row % 8 * 4;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int chunk = c * blockDim.x + threadIdx.x;
        Words out;
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const u32 near = halves[c][t], far = halves[c][4 + t];
            const u32 low = round_bytes(widen(near & 0xFFFFu) * inverse, widen(far & 0xFFFFu) * inverse);
            const u32 high = round_bytes(widen(near >> 16) * inverse, widen(far >> 16) * inverse);
            out.at[t] = high << 16 | low;
            sum += sum_bytes(out.at[t]);
        }
        // Eight threads hold a unit.
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        const int unit = chunk / 8;
        if (unit < p.U) reinterpret_cast<Words *>(p.data + static_cast<size_t>(row) * p.U * 128)[chunk] = out;
        if (chunk % 8 == 0 && unit < (p.U + 7) / 8 * 8)
            sums[static_cast<size_t>(unit / 8) * p.stride * 8 + unit % 8 / 4 * 32 + unit % 4] = __uint_as_float(round_tf32(sum));
    }
}
