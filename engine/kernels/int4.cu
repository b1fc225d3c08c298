// Few rows times 4-bit weights at the speed of the memory; the layout is drawn in int4.py.
//
// y = x W^T is computed as W x^T: weight rows ride the long side of the matrix instruction, activation rows the short one.
// The copy engine brings weights in the order in which lanes want them, so two of them cost one lop3, one addition and half
// a shift (see unpack); they are exact integers, and scales multiply the float32 sums of a group. One thread of a thread
// block copies. Up to 16 rows are multiplied by 8 warps with mma.m16n8k16, activations in registers; more by four warpgroups
// with wgmma, activations in shared memory. It takes as many to keep the matrix unit busy beside all the unpacking.
//
// Work is cut into units of BLOCKS * 128 rows x 128 inputs, and every thread block takes an equal run of consecutive units, so
// all finish together whatever the shape ("stream-K", Osama et al. 2023, section 4). A row block whose units fell to several
// thread blocks is summed by several of them, each a share of its outputs, in the order of the inputs: the result does not
// depend on timing, nor on the number of activation rows.
//
// Compile-time: NT tiles of 8 activation rows, RT tiles of 16 weight rows a warp, STAGES of the ring, GROUPS a unit, IS_BF16,
// IS_GATED: whether rows g and g + 8 of a tile are a gate and what it gates.

static constexpr bool BY_GROUPS = NT > 2; // of four warps, wgmma
static constexpr int WARPS = BY_GROUPS ? 16 : 8; // that multiply
static constexpr int THREADS = 32 * WARPS;
static constexpr int COPIERS = BY_GROUPS ? 128 : 32; // threads besides; a warpgroup can give its registers to the others
static constexpr int COPIER_REGISTERS = 24, REGISTERS = 112;
static constexpr int MIN_BLOCKS = BY_GROUPS ? 1 : 2; // that registers leave room for on a multiprocessor
static constexpr int BLOCKS = RT * WARPS / 8; // of 128 weight rows, side by side
static constexpr int TILE_BYTES = 1024; // 16 rows x 128 inputs
static constexpr int HALF_BYTES = NT * 8 * 128; // activations: two halves of 64 inputs, swizzled by the copy engine
// Of a stage: codes, activations (at a multiple of 1024, as the swizzle goes by address), scales.
static constexpr int BLOCK_BYTES = 8 * TILE_BYTES;
static constexpr int CODE_BYTES = BLOCKS * BLOCK_BYTES;
static constexpr int X_BYTES = 2 * HALF_BYTES;
static constexpr int SCALE_BYTES = BLOCKS * GROUPS * 512;
static constexpr int STAGE_BYTES = (CODE_BYTES + X_BYTES + SCALE_BYTES + 1023) / 1024 * 1024;
// Stages whose weights are sent for before the kernel ahead has ended. The first activations wait behind them in the copy
// engine: behind all of a ring some 0.4 us longer.
static constexpr int EAGER = NT == 1 ? 4 : 3;

static constexpr u32 EXPONENT = IS_BF16 ? 0x43004300u : 0x64006400u;

// Everything a launch is told. U units along the inputs, B blocks of 128 rows.
struct Problem {
    TensorMap x;      // (M, K) halves, boxes of NT * 8 rows x 64
    const u8 *codes;  // (B, U, 8, 1024 bytes)
    const u8 *scales; // (B, U, GROUPS, 8, 64 bytes)
    const u16 *bias;  // (N,) or null
    u16 *y;           // (M, N), or (M, N / 2) where gated
    Floats *parts;    // (gridDim.x, 2, RT * NT * THREADS), all MISSING between launches
    int M, N, U, B;
};

// Behind the ring. Of each stage: its bytes have come, all warps have left it.
struct Control {
    u64 filled[STAGES], left[STAGES];
};

// Run b of consecutive units is [start(b), start(b + 1)) of `total`.
struct Shares {
    int whole, extra;
    DEVICE Shares(int total, int blocks) : whole(total / blocks), extra(total % blocks) {}
    DEVICE int start(int block) const { return block * whole + (block < extra ? block : extra); }
    DEVICE int owner(int unit) const {
        int longer = extra * (whole + 1);
        return unit < longer ? unit / (whole + 1) : extra + (unit - longer) / whole;
    }
};

// Next unit to be copied.
struct Cursor {
    int row_block, u;
    DEVICE void advance(int units) {
        if (++u == units) u = 0, row_block++;
    }
};

// Announce a stage's bytes and send for its weights.
DEVICE void copy_weights(const Problem &p, u8 *stage, u64 *filled, const Cursor &at) {
    barrier_arrive_expect(filled, CODE_BYTES + X_BYTES + SCALE_BYTES);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        // Rows past the last block are read again from it and never stored.
        size_t unit = static_cast<size_t>(min(at.row_block * BLOCKS + b, p.B - 1)) * p.U + at.u;
        copy_bulk(stage + b * BLOCK_BYTES, p.codes + unit * BLOCK_BYTES, BLOCK_BYTES, filled);
        copy_bulk(stage + CODE_BYTES + X_BYTES + b * GROUPS * 512, p.scales + unit * (GROUPS * 512), GROUPS * 512, filled);
    }
}

DEVICE void copy_x(const Problem &p, u8 *stage, u64 *filled, int u) {
    copy_box(stage + CODE_BYTES, &p.x, u * 128, 0, filled);
    copy_box(stage + CODE_BYTES + HALF_BYTES, &p.x, u * 128 + 64, 0, filled);
}

// The scale words of rows g and g + 8.
DEVICE void read_scales(u32 (&scale)[2], const u8 *at) {
    const u64 pair = *reinterpret_cast<const u64 *>(at);
    scale[0] = static_cast<u32>(pair), scale[1] = static_cast<u32>(pair >> 32);
}

// The four pairs of one word, rows g, g + 8, g, g + 8, less their zero points, which the scale words end in.
//
// A nibble under the exponent of 128 (bfloat16) or 1024 (float16) is 128 + code, and less 128 + zero the exact integer. So
// rows g; those of g + 8 lie a nibble higher and stay there: in float16 that is 1024 + 16 code. In bfloat16, which has three
// bits there, the bare nibble is the denormal code / 2^129, and 2^127 of it less zero / 4 a quarter of the integer.
DEVICE void unpack(u32 (&a)[4], u32 word, const u32 (&scale)[2]) {
    const u32 zero = (scale[0] & 15u) * 0x00010001u | EXPONENT;
    u32 zero8 = (scale[1] & 15u) * 0x00100010u;
    zero8 = IS_BF16 ? multiply_pair(zero8, 0xFF00FF00u) : zero8 | EXPONENT;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 codes = word >> (8 * i);
        a[2 * i] = subtract_pair(select(codes, 0x000F000Fu, EXPONENT), zero);
        a[2 * i + 1] = IS_BF16 ? multiply_add_pair(codes & 0x00F000F0u, 0x7F007F00u, zero8)
                               : subtract_pair(select(codes, 0x00F000F0u, EXPONENT), zero8);
    }
}

// Add a group's sums, scaled; those of rows g + 8 are of what unpack makes of their integers.
DEVICE void add_group(float (&acc)[NT][4], const float (&sum)[NT][4], const u32 (&scale)[2]) {
    const float factor[2] = {__uint_as_float(scale[0] & ~15u),
                             __uint_as_float(scale[1] & ~15u) * (IS_BF16 ? 4.0f : 1.0f / 16)};
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[nt][i] += factor[i / 2] * sum[nt][i];
}

#if NT <= 2
// Where a lane reads, in bytes from a stage's begin: the codes and scales of its warp's first tile, and the activations.
struct Lane {
    int codes, scales, x;

    DEVICE Lane() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        codes = warp * TILE_BYTES + lane * 16;
        scales = CODE_BYTES + X_BYTES + warp * 64 + lane / 4 * 8;
        // It asks for 16 bytes of row l % 8 of a tile, which lie swizzled by the row's number: of two tiles 16 inputs at a time,
        // of one 32.
        const int tile = NT == 2 ? lane / 16 : 0, piece = NT == 2 ? lane / 8 % 2 : lane / 8;
        x = CODE_BYTES + (tile * 8 + lane % 8) * 128 + ((piece ^ lane % 8) << 4);
        // What comes from a shuffle is kept: the compiler cannot work it out anew for every unit.
        codes = __shfl_sync(~0u, codes, lane);
        scales = __shfl_sync(~0u, scales, lane);
        x = __shfl_sync(~0u, x, lane);
    }
};

DEVICE void multiply_unit(float (&acc)[RT][NT][4], const u8 *stage, const Lane &lane) {
    constexpr int STEPS = 8 / GROUPS; // of 16 inputs, in a group
    const u32 x = shared_address(stage) + lane.x;
    float sum[RT][NT][4];
    clear(sum);
    Words words[RT];
    u32 scale[RT][2], b[4];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u32 a[RT][4];
#pragma unroll
        for (int rt = 0; rt < RT; rt++) {
            if (k % 4 == 0)
                words[rt] = *reinterpret_cast<const Words *>(stage + lane.codes + rt * BLOCK_BYTES + k / 4 * 512);
            if (k % STEPS == 0) read_scales(scale[rt], stage + lane.scales + (rt * GROUPS + k / STEPS) * 512);
            unpack(a[rt], words[rt].at[k % 4], scale[rt]);
        }
        if (NT == 2 || k % 2 == 0) load_matrices(b, (x ^ k % 4 << 5) + k / 4 * HALF_BYTES);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int rt = 0; rt < RT; rt++) {
                const int half = NT == 2 ? nt : k % 2;
                multiply(sum[rt][nt], a[rt], b[2 * half], b[2 * half + 1]);
            }
        if ((k + 1) % STEPS == 0)
#pragma unroll
            for (int rt = 0; rt < RT; rt++) {
                add_group(acc[rt], sum[rt], scale[rt]);
                clear(sum[rt]);
            }
    }
}
#else
struct Lane {}; // nothing worth keeping beside so many sums

// A warp's rows of a stage.
struct Weights {
    const u8 *codes, *scales;

    DEVICE explicit Weights(const u8 *stage) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        codes = stage + warp * TILE_BYTES + lane * 16;
        scales = stage + CODE_BYTES + X_BYTES + warp / 8 * (GROUPS * 512) + warp % 8 * 64 + lane / 4 * 8;
    }

    // The words of 64 inputs.
    DEVICE Words half(int rt, int which) const {
        return *reinterpret_cast<const Words *>(codes + rt * WARPS * TILE_BYTES + which * 512);
    }

    DEVICE void group(u32 (&scale)[2], int rt, int group) const {
        read_scales(scale, scales + (rt * (WARPS / 8) * GROUPS + group) * 512);
    }
};

// A batch of products is under way while the next is unpacked. (Batches of one are slower, of four as fast up to 32 rows.)
DEVICE void multiply_unit(float (&acc)[RT][NT][4], const u8 *stage, const Lane &) {
    constexpr int STEPS = 8 / GROUPS, BATCH = 2; // products of 16 inputs
    const Weights weights(stage);
    // The compiler takes what lane 0 says as the same for a warp, and need not move it to where wgmma wants it every time.
    const u32 x = __shfl_sync(~0u, describe(stage + CODE_BYTES), 0);
    float sum[NT][4];
    u32 a[2][BATCH][4], scale[2];
#pragma unroll
    for (int rt = 0; rt < RT; rt++) {
        const Words words[2] = {weights.half(rt, 0), weights.half(rt, 1)};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            weights.group(scale, rt, group);
#pragma unroll
            for (int step = 0; step < STEPS; step += BATCH) {
                u32(&batch)[BATCH][4] = a[step / BATCH % 2];
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const int at = group * STEPS + step + k;
                    unpack(batch[k], words[at / 4].at[at % 4], scale);
                }
                group_begin();
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const int at = group * STEPS + step + k;
                    const u32 b = x + (at / 4 * HALF_BYTES + at % 4 * 32 >> 4);
                    if (step + k == 0)
                        multiply_group<false>(sum, batch[k], b);
                    else
                        multiply_group(sum, batch[k], b);
                }
                group_commit();
                if (step + BATCH < STEPS) group_wait<1>();
            }
            group_wait<0>();
            settle(sum);
            add_group(acc[rt], sum, scale);
        }
    }
}
#endif

// A thread's sums lie as the matrix instruction leaves them: in four, those of two activation rows, a pair, and of rows g and
// g + 8 of a tile of weights. Its line is which g of its warps' tiles.
static constexpr int LINES = THREADS / 4;
DEVICE int own_line() { return threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4; }
DEVICE int own_pair(int nt) { return nt * 4 + threadIdx.x % 4; }

// Two activation rows' values of one of so many outputs.
DEVICE void put(const Problem &p, int pair, int n, int outputs, float even, float odd) {
    const u32 values = round_pair(even, odd);
    u16 *y = p.y + static_cast<size_t>(2 * pair) * outputs + n;
    if (2 * pair < p.M) y[0] = static_cast<u16>(values);
    if (2 * pair + 1 < p.M) y[outputs] = static_cast<u16>(values >> 16);
}

DEVICE void store(const Problem &p, int row_block, int rt, int pair, int line, const float (&sum)[4]) {
    const int tile = row_block * (BLOCKS * 8) + rt * WARPS + line / 8, n = tile * 16 + line % 8;
    const float bias = p.bias && n < p.N ? widen(p.bias[n]) : 0.0f;
    const float bias8 = p.bias && n + 8 < p.N ? widen(p.bias[n + 8]) : 0.0f;
    const float even = sum[0] + bias, odd = sum[1] + bias, even8 = sum[2] + bias8, odd8 = sum[3] + bias8;
    if constexpr (IS_GATED) {
        if (n < p.N) put(p, pair, tile * 8 + line % 8, p.N / 2, apply_gate(even, even8), apply_gate(odd, odd8));
    } else {
        if (n < p.N) put(p, pair, n, p.N, even, odd);
        if (n + 8 < p.N) put(p, pair, n + 8, p.N, even8, odd8);
    }
}

DEVICE void store_all(const Problem &p, const float (&acc)[RT][NT][4], int row_block) {
#pragma unroll
    for (int rt = 0; rt < RT; rt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) store(p, row_block, rt, own_pair(nt), own_line(), acc[rt][nt]);
}

// A row block that runs [first, last] have parts of, and [first, sharing) sum. Where the last goes on behind it, it has put its
// part aside for long when the others end. Up to 8 rows that makes it quicker to leave the sum to those; more are so much to
// read that all take a share.
struct Cut {
    int first_unit, first, last, sharing;
    DEVICE Cut(const Problem &p, const Shares &shares, int row_block)
        : first_unit(row_block * p.U), first(shares.owner(first_unit)), last(shares.owner(first_unit + p.U - 1)),
          sharing(NT == 1 && last > first && shares.start(last + 1) > first_unit + p.U ? last : last + 1) {}
    // Where a run puts its part, as (RT, pairs that there are, LINES). A run has at most one that begins a row block, its last,
    // and one that does not.
    DEVICE Floats *part(const Problem &p, const Shares &shares, int run) const {
        const int place = shares.start(run) <= first_unit ? 1 : 0;
        return p.parts + static_cast<size_t>(run * 2 + place) * (RT * NT * THREADS);
    }
};

DEVICE int count_pairs(const Problem &p) { return (p.M + 1) / 2; }

// Put this thread block's part aside.
DEVICE void leave(const Problem &p, const float (&acc)[RT][NT][4], Floats *part) {
    const int pairs = count_pairs(p);
#pragma unroll
    for (int rt = 0; rt < RT; rt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float(&sum)[4] = acc[rt][nt];
            Floats *at = part + (rt * pairs + own_pair(nt)) * LINES + own_line();
            if (own_pair(nt) < pairs) store_relaxed(at, sum[0], sum[1], sum[2], sum[3]);
        }
}

// Add the only other part.
DEVICE void add(const Problem &p, float (&acc)[RT][NT][4], Floats *part) {
    const int pairs = count_pairs(p);
    Floats sums[RT][NT];
    bool waits;
    do {
        waits = false;
#pragma unroll
        for (int rt = 0; rt < RT; rt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                if (own_pair(nt) >= pairs) continue;
                sums[rt][nt] = load_relaxed(part + (rt * pairs + own_pair(nt)) * LINES + own_line());
                waits |= is_missing(sums[rt][nt]);
            }
    } while (waits);
#pragma unroll
    for (int rt = 0; rt < RT; rt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            if (own_pair(nt) >= pairs) continue;
            clear_part(part + (rt * pairs + own_pair(nt)) * LINES + own_line());
#pragma unroll
            for (int i = 0; i < 4; i++) acc[rt][nt][i] += sums[rt][nt].at[i];
        }
}

// Sum and store this thread block's share of a row block.
//
// It waits here for others of its launch, which must therefore all get to run: there are no more than run at once, and where
// kernels of other streams hold multiprocessors, only those wait that share a row block with the last one to have started
// (MOST_SHARES of workspace.py bounds them).
DEVICE void collect(const Problem &p, const Shares &shares, const Cut &cut, int run, int row_block) {
    constexpr int AT_ONCE = 8;
    const int pairs = count_pairs(p), total = RT * pairs * LINES, sharers = cut.sharing - cut.first, own = run - cut.first;
    for (int at = total * own / sharers + threadIdx.x; at < total * (own + 1) / sharers; at += THREADS) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int next = cut.first; next <= cut.last; next += AT_ONCE) {
            Floats parts[AT_ONCE];
            bool waits;
            do { // for all of them at once: one that is missing costs a way to memory, whatever the others do
                waits = false;
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    parts[k] = load_relaxed(cut.part(p, shares, min(next + k, cut.last)) + at);
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) waits |= is_missing(parts[k]);
            } while (waits);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (next + k > cut.last) break;
                clear_part(cut.part(p, shares, next + k) + at);
#pragma unroll
                for (int i = 0; i < 4; i++) sum[i] += parts[k].at[i];
            }
        }
        store(p, row_block, at / LINES / pairs, at / LINES % pairs, at % LINES, sum);
    }
}

// The sums of a row block are ready, or of a part of it, which begins it or does not.
DEVICE void finish(const Problem &p, float (&acc)[RT][NT][4], const Shares &shares, int run, int row_block, bool begins) {
    const Cut cut(p, shares, row_block);
    const bool is_whole = cut.first == cut.last, is_alone = begins && cut.sharing == run + 1;
    if (!is_whole && !is_alone) return leave(p, acc, cut.part(p, shares, run));
    if (NT == 1 && !is_whole) add(p, acc, cut.part(p, shares, cut.last));
    store_all(p, acc, row_block);
}

// One thread: keep the ring full.
DEVICE void feed(const Problem &p, u8 *ring, Control &control, Cursor at, int count) {
    const int ahead = min(count, STAGES), eager = min(ahead, EAGER);
    Cursor x = at; // the next unit whose activations are to be copied
    prefetch_map(&p.x);
    for (int i = 0; i < eager; i++, at.advance(p.U)) copy_weights(p, ring + i * STAGE_BYTES, control.filled + i, at);
    // Weights do not depend on the kernel before; everything after this line may.
    wait_for_inputs();
    for (int i = 0; i < eager; i++, x.advance(p.U)) copy_x(p, ring + i * STAGE_BYTES, control.filled + i, x.u);
    for (int i = eager; i < ahead; i++, at.advance(p.U)) {
        copy_weights(p, ring + i * STAGE_BYTES, control.filled + i, at);
        copy_x(p, ring + i * STAGE_BYTES, control.filled + i, at.u);
    }
    Place<STAGES> place;
    for (int step = STAGES; step < count; step++, place.advance(), at.advance(p.U)) {
        u64 *filled = control.filled + place.stage;
        barrier_wait(control.left + place.stage, place.parity);
        copy_weights(p, ring + place.stage * STAGE_BYTES, filled, at);
        copy_x(p, ring + place.stage * STAGE_BYTES, filled, at.u);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, MIN_BLOCKS) int4_linear(const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 ring[];
    Control &control = *reinterpret_cast<Control *>(ring + STAGES * STAGE_BYTES);
    release_dependents();
    const Shares shares((p.B + BLOCKS - 1) / BLOCKS * p.U, gridDim.x);
    const int run = blockIdx.x, begin = shares.start(run), count = shares.start(run + 1) - begin;
    int row_block = begin / p.U, u = begin % p.U;
    if (threadIdx.x < STAGES) {
        barrier_init(control.filled + threadIdx.x, 1);
        barrier_init(control.left + threadIdx.x, WARPS);
    }
    fence_for_copies();
    __syncthreads();
    // As in multiply_unit: a warp has one role, so that places in the ring are counted once for all its lanes.
    if (__shfl_sync(~0u, threadIdx.x / 32, 0) >= WARPS) {
        if (BY_GROUPS) keep_registers<COPIER_REGISTERS>();
        if (threadIdx.x == THREADS) feed(p, ring, control, Cursor{row_block, u}, count);
        return;
    }
    if (BY_GROUPS) take_registers<REGISTERS>();
    const Lane lane;
    wait_for_inputs();
    float acc[RT][NT][4];
    clear(acc);
    bool begins = u == 0; // whether this part holds the row block's first unit
    Place<STAGES> place;
    for (int step = 0; step < count; step++, place.advance()) {
        barrier_wait(control.filled + place.stage, place.parity);
        multiply_unit(acc, ring + place.stage * STAGE_BYTES, lane);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(control.left + place.stage);
        if (++u == p.U || step + 1 == count) {
            finish(p, acc, shares, run, row_block, begins);
            clear(acc);
            u = 0, row_block++, begins = true;
        }
    }
    // Where it shares in a sum, it does so once others have had time: the row block it began with, and the one it ended with.
    const int last = (begin + count - 1) / p.U;
    for (row_block = begin / p.U; row_block <= last; row_block = max(row_block + 1, last)) {
        const Cut cut(p, shares, row_block);
        if (cut.sharing > cut.first + 1 && cut.sharing > run) collect(p, shares, cut, run, row_block);
    }
}
