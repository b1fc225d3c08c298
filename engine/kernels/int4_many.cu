// Many rows times 4-bit weights at the speed of the matrix units; the weights' layout is drawn in int4.py.
//
// y = x W^T is computed as W x^T. Weights go from shared memory to registers, become halves there, and enter the matrix unit
// as its first operand; activations enter from shared memory. TEAMS warpgroups multiply, each RT * 64 weight rows by NT * 8
// activation rows, and unpack weights of 16 inputs while the matrix unit works on those before; one more copies.
//
// Thread blocks first take whole tiles in turn. What would leave some of them idle at the end is cut along the inputs into
// equal runs ("stream-K", Osama et al. 2023, section 4). The parts of a tile are summed pairwise, in a tree over its owners;
// whoever comes second to a node adds, and as a + b = b + a the result does not depend on timing.
//
// Compile-time: NT, RT 1 or 2, STAGES of the ring, GROUPS a unit of 128 inputs, IS_BF16.

static constexpr int TEAMS = 2; // more of them leave too few registers to unpack ahead
static constexpr int DEPTH = 4; // products of 16 inputs under way
static constexpr int TEAM_WARPS = 4;
static constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
static constexpr int THREADS = TEAM_THREADS * (TEAMS + 1);
static constexpr int BLOCKS = TEAMS * RT / 2;   // of 128 weight rows, side by side
static constexpr int TILE_BYTES = 1024;         // codes of 16 rows x 128 inputs
static constexpr int BLOCK_BYTES = 8 * TILE_BYTES;
static constexpr int HALF_BYTES = NT * 8 * 128; // activations: two halves of 64 inputs, swizzled by the copy engine
// Of a stage: codes, activations (at a multiple of 1024, as the swizzle goes by address), scales.
static constexpr int CODE_BYTES = BLOCKS * BLOCK_BYTES;
static constexpr int X_BYTES = 2 * HALF_BYTES;
static constexpr int SCALE_BYTES = BLOCKS * GROUPS * 512;
static constexpr int STAGE_BYTES = (CODE_BYTES + X_BYTES + SCALE_BYTES + 1023) / 1024 * 1024;
// Results on their way out: two boxes for each team.
static constexpr int BOX_ROWS = 64 / TEAMS; // by 64 weight rows
static constexpr int BOX_BYTES = BOX_ROWS * 128;
static constexpr int BOXES = NT * 8 / BOX_ROWS; // of a team's 64 weight rows
static_assert(RT * BOXES % 2 == 0, "boxes are used in turn");

static constexpr u32 EXPONENT = IS_BF16 ? 0x43004300u : 0x64006400u; // of 128 or 1024, twice

// Everything a launch is told. U units along the inputs, B blocks of 128 weight rows.
struct Problem {
    TensorMap x;      // (M, K) halves, boxes of NT * 8 rows x 64
    TensorMap y;      // (M, N) halves, boxes of BOX_ROWS x 64
    const u8 *codes;  // (B, U, 8, 1024 bytes)
    const u8 *scales; // (B, U, GROUPS, 8, 64 bytes)
    const u16 *bias;  // (N,) or null
    Floats *partials; // (gridDim.x, TEAMS, RT * NT, TEAM_THREADS)
    int *states;      // (gridDim.x, TEAMS), all zero between launches; see join
    int N, U, B;
    int x_tiles;      // along the activation rows
    int tiles, whole; // so many of the first are not split
};

// Behind the ring and the boxes. Of each stage: its bytes have come, all warps have left it.
struct Control {
    u64 filled[STAGES], left[STAGES];
    int seen[TEAMS];
};

// A place in the ring, and the parity of its barriers' current phase.
struct Place {
    int stage = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Thread block b owns units [start(b), start(b + 1)) of the split tiles.
struct Shares {
    int each, extra;
    DEVICE Shares(const Problem &p) {
        const int total = (p.tiles - p.whole) * p.U, blocks = gridDim.x;
        each = total / blocks, extra = total % blocks;
    }
    DEVICE int start(int block) const { return block * each + (block < extra ? block : extra); }
    DEVICE int owner(int unit) const {
        const int longer = extra * (each + 1);
        return unit < longer ? unit / (each + 1) : extra + (unit - longer) / each;
    }
};

// The next of a thread block's units: those of its whole tiles, then its share.
struct Cursor {
    int rounds, tile, u, share;
    DEVICE Cursor(const Problem &p, const Shares &shares) : tile(blockIdx.x), u(0), share(shares.start(blockIdx.x)) {
        const int blocks = gridDim.x;
        rounds = (p.whole - tile + blocks - 1) / blocks;
        if (!rounds) enter_share(p);
    }
    DEVICE void enter_share(const Problem &p) { tile = p.whole + share / p.U, u = share % p.U; }
    // True at a tile's end.
    DEVICE bool advance(const Problem &p) {
        if (++u < p.U) return false;
        u = 0;
        if (rounds > 1)
            tile += gridDim.x, rounds--;
        else if (rounds == 1)
            rounds = 0, enter_share(p);
        else
            tile++;
        return true;
    }
    // Weight blocks past the last are read again from it and never stored.
    DEVICE int block(const Problem &p) const { return tile / p.x_tiles * BLOCKS; }
    DEVICE int x_row(const Problem &p) const { return tile % p.x_tiles * (NT * 8); }
};

DEVICE int count_units(const Problem &p, const Shares &shares) {
    const int own = blockIdx.x, blocks = gridDim.x;
    return (p.whole - own + blocks - 1) / blocks * p.U + shares.start(own + 1) - shares.start(own);
}

// Announce a stage's bytes and send for its weights.
DEVICE void copy_weights(const Problem &p, u8 *stage, u64 *filled, const Cursor &at) {
    barrier_arrive_expect(filled, CODE_BYTES + X_BYTES + SCALE_BYTES);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const size_t unit = static_cast<size_t>(min(at.block(p) + b, p.B - 1)) * p.U + at.u;
        copy_bulk(stage + b * BLOCK_BYTES, p.codes + unit * BLOCK_BYTES, BLOCK_BYTES, filled);
        copy_bulk(stage + CODE_BYTES + X_BYTES + b * GROUPS * 512, p.scales + unit * (GROUPS * 512), GROUPS * 512, filled);
    }
}

DEVICE void copy_x(const Problem &p, u8 *stage, u64 *filled, const Cursor &at) {
    copy_box(stage + CODE_BYTES, &p.x, at.u * 128, at.x_row(p), filled);
    copy_box(stage + CODE_BYTES + HALF_BYTES, &p.x, at.u * 128 + 64, at.x_row(p), filled);
}

// One lane of the last warpgroup: keep the ring full.
DEVICE void feed(const Problem &p, u8 *ring, Control &control, const Shares &shares) {
    const int count = count_units(p, shares), ahead = min(count, STAGES);
    Cursor at(p, shares), x_at = at;
    prefetch_map(&p.x);
    for (int i = 0; i < ahead; i++, at.advance(p)) copy_weights(p, ring + i * STAGE_BYTES, control.filled + i, at);
    // Weights do not depend on the kernel before; everything after this line may.
    wait_for_inputs();
    for (int i = 0; i < ahead; i++, x_at.advance(p)) copy_x(p, ring + i * STAGE_BYTES, control.filled + i, x_at);
    Place place;
    for (int step = STAGES; step < count; step++, place.advance(), at.advance(p)) {
        u8 *stage = ring + place.stage * STAGE_BYTES;
        barrier_wait(control.left + place.stage, place.parity);
        copy_weights(p, stage, control.filled + place.stage, at);
        copy_x(p, stage, control.filled + place.stage, at);
    }
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

// This warp has read all it wants of a stage. No branch here, and none within multiply_unit: only in straight code does the
// compiler let products run on behind other work.
DEVICE void leave(Control &control, int stage, bool is_due = true) {
    barrier_arrive(control.left + stage, is_due && threadIdx.x % 32 == 0);
}

// Multiply a unit. On return its last products may still be under way; the stage before, unless -1, has been left.
DEVICE void multiply_unit(float (&acc)[RT][NT][4], u32 (&a)[DEPTH][4], const u8 *stage, Control &control, int before) {
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
    for (int step = 0; step < 8 * RT; step++) {
        const int rt = step / 8, at = step % 8; // 16 inputs each
        if (at % (8 / GROUPS) == 0) scale.set(pairs[rt][at / (8 / GROUPS)]);
        unpack(a[step % DEPTH], words[rt][at / 4].at[at % 4], scale);
        group_begin();
        multiply_group(acc[rt], a[step % DEPTH], x + (at / 4 * HALF_BYTES + at % 4 * 32 >> 4));
        group_commit();
        group_wait<DEPTH - 1>();
        if (step == DEPTH - 2) leave(control, max(before, 0), before >= 0);
    }
}

// Round a tile's sums and send them out, a box at a time.
DEVICE void store(const Problem &p, const float (&acc)[RT][NT][4], u8 *boxes, int block, int x_row) {
    const int team = threadIdx.x / TEAM_THREADS, warp = threadIdx.x / 32 % TEAM_WARPS, lane = threadIdx.x % 32;
    const bool sends = threadIdx.x % TEAM_THREADS == 0;
    boxes += team * 2 * BOX_BYTES;
#pragma unroll
    for (int rt = 0; rt < RT; rt++) {
        const int first = block * 128 + (team * RT + rt) * 64, n = first + warp * 16 + lane / 4;
        const float bias = p.bias && n < p.N ? widen(p.bias[n]) : 0.0f;
        const float bias8 = p.bias && n + 8 < p.N ? widen(p.bias[n + 8]) : 0.0f;
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            u8 *box = boxes + (rt * BOXES + i) % 2 * BOX_BYTES;
            if (sends) store_wait<1>();
            sync_some(1 + team, TEAM_THREADS);
#pragma unroll
            for (int pair = 0; pair < BOX_ROWS / 16; pair++) {
                // Lane l names the place of row l % 8 of matrix l / 8; pieces of 16 bytes are swizzled by their row's number.
                const int row = pair * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
                const int nt = i * (BOX_ROWS / 8) + pair * 2;
                const float(&low)[4] = acc[rt][nt], (&high)[4] = acc[rt][nt + 1];
                store_turned(box + row * 128 + ((piece ^ (row & 7)) << 4), round_pair(low[0] + bias, low[1] + bias),
                             round_pair(low[2] + bias8, low[3] + bias8), round_pair(high[0] + bias, high[1] + bias),
                             round_pair(high[2] + bias8, high[3] + bias8));
            }
            fence_for_copies();
            sync_some(1 + team, TEAM_THREADS);
            if (sends) store_box(&p.y, first, x_row + i * BOX_ROWS, box);
        }
    }
}

// Sum a split tile over its owners. True for the team that then holds the sum. A node of the tree joins the parts of thread
// blocks [left, right) and [right, ...); its number is `right`, which begins inside no other tile. Of the two that come the
// first leaves its part and goes (states: 1 came, 2 left), the second waits out that writing and adds it to its own.
DEVICE bool join(const Problem &p, float (&acc)[RT][NT][4], const Shares &shares, int tile, int &seen) {
    const int team = threadIdx.x / TEAM_THREADS, thread = threadIdx.x % TEAM_THREADS;
    const int first_unit = (tile - p.whole) * p.U, first = shares.owner(first_unit);
    const int owners = shares.owner(first_unit + p.U - 1) - first + 1;
    int left = blockIdx.x - first;
    for (int stride = 1; stride < owners; stride *= 2) {
        left &= ~stride;
        if (left + stride >= owners) continue; // no one to meet
        const int node = (first + left + stride) * TEAMS + team;
        Floats *part = p.partials + node * (RT * NT * TEAM_THREADS) + thread;
        if (thread == 0) seen = arrive_and_see(p.states + node);
        sync_some(1 + team, TEAM_THREADS);
        const bool is_first = seen == 0;
        if (is_first) {
#pragma unroll
            for (int rt = 0; rt < RT; rt++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    Floats sum;
#pragma unroll
                    for (int i = 0; i < 4; i++) sum.at[i] = acc[rt][nt][i];
                    part[(rt * NT + nt) * TEAM_THREADS] = sum;
                }
            sync_some(1 + team, TEAM_THREADS);
            if (thread == 0) release_add(p.states + node, 2);
            return false;
        }
        if (thread == 0) {
            while (load_acquired(p.states + node) != 4) continue;
            p.states[node] = 0;
        }
        sync_some(1 + team, TEAM_THREADS);
#pragma unroll
        for (int rt = 0; rt < RT; rt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const Floats sum = load_shared_work(part + (rt * NT + nt) * TEAM_THREADS);
#pragma unroll
                for (int i = 0; i < 4; i++) acc[rt][nt][i] += sum.at[i];
            }
    }
    return true;
}

DEVICE void multiply_all(const Problem &p, u8 *ring, u8 *boxes, Control &control, const Shares &shares) {
    const int count = count_units(p, shares);
    float acc[RT][NT][4];
    u32 a[DEPTH][4];
    Cursor at(p, shares);
    Place place;
    for (int step = 0; step < count;) {
        const Cursor began = at;
#pragma unroll
        for (int rt = 0; rt < RT; rt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[rt][nt][i] = 0.0f;
        int before = -1;
        bool is_whole;
        do {
            barrier_wait(control.filled + place.stage, place.parity);
            multiply_unit(acc, a, ring + place.stage * STAGE_BYTES, control, before);
            before = place.stage;
            place.advance();
            is_whole = at.advance(p);
        } while (++step < count && !is_whole);
        group_wait<0>();
        settle(acc);
        leave(control, before);
        is_whole &= began.u == 0;
        if (is_whole || join(p, acc, shares, began.tile, control.seen[threadIdx.x / TEAM_THREADS]))
            store(p, acc, boxes, began.block(p), began.x_row(p));
    }
    if (threadIdx.x % TEAM_THREADS == 0) store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) int4_many(const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 ring[];
    u8 *boxes = ring + STAGES * STAGE_BYTES;
    Control &control = *reinterpret_cast<Control *>(boxes + TEAMS * 2 * BOX_BYTES);
    release_dependents();
    const Shares shares(p);
    if (threadIdx.x < STAGES) {
        barrier_init(control.filled + threadIdx.x, 1);
        barrier_init(control.left + threadIdx.x, TEAMS * TEAM_WARPS);
    }
    fence_for_copies();
    __syncthreads();
    // The compiler takes what lane 0 says as the same for a warp.
    if (__shfl_sync(~0u, threadIdx.x / TEAM_THREADS, 0) == TEAMS) {
        keep_registers<40>();
        if (threadIdx.x == TEAMS * TEAM_THREADS) feed(p, ring, control, shares);
    } else {
        take_registers<232>();
        wait_for_inputs();
        multiply_all(p, ring, boxes, control, shares);
    }
}
