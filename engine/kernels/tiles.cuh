// Tiles of y = W x^T dealt out to thread blocks: what int4_many.cu and int4_fp8.cu have in common. Weights are the matrix
// unit's first operand, from registers, activations its second, from shared memory. TEAMS warpgroups multiply, each RT * 64
// weight rows by NT * 8 activation rows; one more copies.
//
// Thread blocks first take whole tiles in turn. What would leave some of them idle at the end is cut along the inputs into
// equal runs ("stream-K", Osama et al. 2023, section 4). The parts of a tile are summed by all who have one, each some boxes of
// its outputs, in the order of the inputs: the result does not depend on timing.
//
// Compile-time: NT, RT 1 or 2, STAGES of the ring, IS_BF16, IS_GATED (rows g and g + 8 of a tile of 16 weight rows are a gate
// and what it gates). A program brings its problem P, a Problem with STAGE_BYTES and registers a thread; copy_weights and
// copy_x, which fill a stage; its Team, which multiplies stages; and scale_box, which does to sums what is left to do. They
// are told which stage is the thread block's last.

static constexpr int TEAMS = 2; // more of them leave too few registers to unpack ahead
static constexpr int TEAM_WARPS = 4;
static constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
static constexpr int THREADS = TEAM_THREADS * (TEAMS + 1);
static constexpr int BLOCKS = TEAMS * RT / 2;   // of 128 weight rows, side by side
static constexpr int TILE_BYTES = 1024;         // codes of 16 rows x 128 inputs
static constexpr int BLOCK_BYTES = 8 * TILE_BYTES;
static constexpr int CODE_BYTES = BLOCKS * BLOCK_BYTES;
static constexpr int SPAN = 1024 / (NT * 8);    // tiles of a strip, see Cursor

// Results on their way out: two boxes for each team.
static constexpr int BOX_ROWS = 64 / TEAMS;                 // by 64 weight rows
static constexpr int BOX_WIDTH = IS_GATED ? 64 : 128;       // bytes
static constexpr int BOX_BYTES = BOX_ROWS * BOX_WIDTH;
static constexpr int BOX_TILES = BOX_ROWS / 8;
static constexpr int BOXES = NT * 8 / BOX_ROWS; // of a team's 64 weight rows
static_assert(RT * BOXES % 2 == 0, "boxes are used in turn");

// Everything a launch is told. U units along the inputs, B blocks of 128 weight rows.
struct Problem {
    TensorMap x;      // (M, K), boxes of NT * 8 rows x 128 bytes
    TensorMap y;      // (M, N) halves, or (M, N / 2) where gated, boxes of BOX_ROWS x BOX_WIDTH bytes
    const u8 *codes;  // (B, U, 8, 1024 bytes)
    const u8 *scales; // (B, U, groups, 8, 64 bytes)
    const u16 *bias;  // (N,) or null
    Floats *parts;    // (gridDim.x, 2, TEAMS, RT * NT, TEAM_THREADS), all MISSING between launches
    int N, U, B;
    int x_tiles;      // along the activation rows
    int tiles, whole; // so many of the first are not split
};

// Behind the ring and the boxes. Of each stage: its bytes have come, all warps have left it.
struct Control {
    u64 filled[STAGES], left[STAGES];
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
//
// Tiles are numbered through a strip of SPAN activation tiles and all weights before the next strip begins. What thread
// blocks read at one time is then about as many activations as weights, the fewest bytes for the work.
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
    DEVICE int strip(const Problem &p) const { return tile / strip_tiles(p) * SPAN; }
    DEVICE int strip_tiles(const Problem &p) const { return p.tiles / p.x_tiles * SPAN; }
    DEVICE int width(const Problem &p) const { return min(SPAN, p.x_tiles - strip(p)); }
    // Weight blocks past the last are read again from it and never stored.
    DEVICE int block(const Problem &p) const { return tile % strip_tiles(p) / width(p) * BLOCKS; }
    DEVICE int x_row(const Problem &p) const { return (strip(p) + tile % strip_tiles(p) % width(p)) * (NT * 8); }
};

DEVICE int count_units(const Problem &p, const Shares &shares) {
    const int own = blockIdx.x, blocks = gridDim.x;
    return (p.whole - own + blocks - 1) / blocks * p.U + shares.start(own + 1) - shares.start(own);
}

// One lane of the last warpgroup: keep the ring full.
template <class P> DEVICE void feed(const P &p, u8 *ring, Control &control, const Shares &shares) {
    const int count = count_units(p, shares), ahead = min(count, STAGES);
    Cursor at(p, shares), x_at = at;
    prefetch_map(&p.x);
    for (int i = 0; i < ahead; i++, at.advance(p))
        copy_weights(p, ring + i * P::STAGE_BYTES, control.filled + i, at, i == count - 1);
    // Weights do not depend on the kernel before; everything after this line may.
    wait_for_inputs();
    for (int i = 0; i < ahead; i++, x_at.advance(p))
        copy_x(p, ring + i * P::STAGE_BYTES, control.filled + i, x_at, i == count - 1);
    Place<STAGES> place;
    for (int step = STAGES; step < count; step++, place.advance(), at.advance(p)) {
        u8 *stage = ring + place.stage * P::STAGE_BYTES;
        barrier_wait(control.left + place.stage, place.parity);
        copy_weights(p, stage, control.filled + place.stage, at, step == count - 1);
        copy_x(p, stage, control.filled + place.stage, at, step == count - 1);
    }
}

// This warp has read all it wants of a stage. No branch here, and none within a Team's multiply: only in straight code does the
// compiler let products run on behind other work.
DEVICE void leave(Control &control, int stage, bool is_due = true) {
    barrier_arrive(control.left + stage, is_due && threadIdx.x % 32 == 0);
}

// Round the sums of 64 weight rows from `first` on and BOX_ROWS activation rows from `x_row` on, and send them out, through one
// of a team's two boxes.
template <class P> DEVICE void send(const P &p, float (&sums)[BOX_TILES][4], u8 *box, int first, int x_row) {
    constexpr int AT_ONCE = IS_GATED ? 4 : 2; // activation tiles in an instruction that stores four matrices of 8 x 8
    const int team = threadIdx.x / TEAM_THREADS, warp = threadIdx.x / 32 % TEAM_WARPS, lane = threadIdx.x % 32;
    const bool sends = threadIdx.x % TEAM_THREADS == 0;
    const int n = first + warp * 16 + lane / 4;
    const float bias = p.bias && n < p.N ? widen(p.bias[n]) : 0.0f;
    const float bias8 = p.bias && n + 8 < p.N ? widen(p.bias[n + 8]) : 0.0f;
    scale_box(p, sums, x_row);
    if (sends) store_wait<1>();
    sync_some(1 + team, TEAM_THREADS);
#pragma unroll
    for (int nt = 0; nt < BOX_TILES; nt += AT_ONCE) {
        u32 pairs[4];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const float(&sum)[4] = sums[nt + k];
            const float even = sum[0] + bias, odd = sum[1] + bias, even8 = sum[2] + bias8, odd8 = sum[3] + bias8;
            if constexpr (IS_GATED) {
                pairs[k] = round_pair(apply_gate(even, even8), apply_gate(odd, odd8));
            } else {
                pairs[2 * k] = round_pair(even, odd);
                pairs[2 * k + 1] = round_pair(even8, odd8);
            }
        }
        // Lane l names the place of row l % 8 of matrix l / 8; pieces of 16 bytes are swizzled by their row's number.
        const int matrix = lane / 8, row = (nt + matrix / (4 / AT_ONCE)) * 8 + lane % 8;
        const int piece = IS_GATED ? warp ^ (row >> 1 & 3) : (warp * 2 + matrix % 2) ^ (row & 7);
        store_turned(box + row * BOX_WIDTH + (piece << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    fence_for_copies();
    sync_some(1 + team, TEAM_THREADS);
    if (sends) store_box(&p.y, IS_GATED ? first / 2 : first, x_row, box);
}

// Send out a tile.
template <class P> DEVICE void store(const P &p, const float (&acc)[RT][NT][4], u8 *boxes, int block, int x_row) {
    const int team = threadIdx.x / TEAM_THREADS;
    boxes += team * 2 * BOX_BYTES;
#pragma unroll
    for (int rt = 0; rt < RT; rt++)
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            float sums[BOX_TILES][4];
#pragma unroll
            for (int nt = 0; nt < BOX_TILES; nt++)
#pragma unroll
                for (int k = 0; k < 4; k++) sums[nt][k] = acc[rt][i * BOX_TILES + nt][k];
            send(p, sums, boxes + (rt * BOXES + i) % 2 * BOX_BYTES, block * 128 + (team * RT + rt) * 64, x_row + i * BOX_ROWS);
        }
}

// A split tile that thread blocks [first, last] have parts of.
struct Split {
    int first_unit, first, last;
    DEVICE Split(const Problem &p, const Shares &shares, int tile)
        : first_unit((tile - p.whole) * p.U), first(shares.owner(first_unit)), last(shares.owner(first_unit + p.U - 1)) {}
    // Where this team of a thread block puts its part. A thread block has at most one that begins a tile and one that does not.
    DEVICE Floats *part(const Problem &p, const Shares &shares, int block) const {
        const int team = threadIdx.x / TEAM_THREADS, place = shares.start(block) <= first_unit ? 1 : 0;
        return p.parts + ((block * 2 + place) * TEAMS + team) * (RT * NT * TEAM_THREADS) + threadIdx.x % TEAM_THREADS;
    }
};

// The addition changes no number, and makes the one NaN that arithmetic gives of whatever the matrix unit gave.
DEVICE void put_aside(const float (&acc)[RT][NT][4], Floats *part) {
#pragma unroll
    for (int rt = 0; rt < RT; rt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float(&sum)[4] = acc[rt][nt];
            Floats *at = part + (rt * NT + nt) * TEAM_THREADS;
            store_relaxed(at, sum[0] + 0.0f, sum[1] + 0.0f, sum[2] + 0.0f, sum[3] + 0.0f);
        }
}

// Sum this thread block's boxes of a split tile, and send them out. It waits for others of its launch, as int4.cu does.
template <class P>
DEVICE void collect(const P &p, const Shares &shares, const Split &split, u8 *boxes, int block, int x_row) {
    constexpr int AT_ONCE = 4;
    const int team = threadIdx.x / TEAM_THREADS, owners = split.last - split.first + 1, own = blockIdx.x - split.first;
    boxes += team * 2 * BOX_BYTES;
    if (threadIdx.x % TEAM_THREADS == 0) store_wait<0>(); // boxes are not in turn with those before
    for (int at = RT * BOXES * own / owners; at < RT * BOXES * (own + 1) / owners; at++) {
        float sums[BOX_TILES][4];
        clear(sums);
        for (int next = split.first; next <= split.last; next += AT_ONCE) {
            Floats parts[AT_ONCE][BOX_TILES];
            bool waits;
            do { // for all of them at once: one that is missing costs a way to memory, whatever the others do
                waits = false;
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    const Floats *part = split.part(p, shares, min(next + k, split.last)) + at * (BOX_TILES * TEAM_THREADS);
#pragma unroll
                    for (int nt = 0; nt < BOX_TILES; nt++) parts[k][nt] = load_relaxed(part + nt * TEAM_THREADS);
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                    for (int nt = 0; nt < BOX_TILES; nt++) waits |= is_missing(parts[k][nt]);
            } while (waits);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (next + k > split.last) break;
                Floats *part = split.part(p, shares, next + k) + at * (BOX_TILES * TEAM_THREADS);
#pragma unroll
                for (int nt = 0; nt < BOX_TILES; nt++) {
                    clear_part(part + nt * TEAM_THREADS);
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[nt][i] += parts[k][nt].at[i];
                }
            }
        }
        const int rt = at / BOXES, i = at % BOXES;
        send(p, sums, boxes + at % 2 * BOX_BYTES, block * 128 + (team * RT + rt) * 64, x_row + i * BOX_ROWS);
    }
}

// A thread block's work, by its last warpgroup and by the others. Team: `acc`, and begin, multiply and finish a tile.
template <class P, class Team>
DEVICE void multiply_all(const P &p, u8 *ring, u8 *boxes, Control &control, const Shares &shares) {
    const int count = count_units(p, shares);
    Team team;
    Cursor at(p, shares);
    Place<STAGES> place;
    for (int step = 0; step < count;) {
        const Cursor began = at;
        team.begin();
        int before = -1;
        bool is_whole;
        do {
            barrier_wait(control.filled + place.stage, place.parity);
            team.multiply(p, ring + place.stage * P::STAGE_BYTES, control, before, at, step == count - 1);
            before = place.stage;
            place.advance();
            is_whole = at.advance(p);
        } while (++step < count && !is_whole);
        team.finish();
        leave(control, before);
        if (is_whole && began.u == 0)
            store(p, team.acc, boxes, began.block(p), began.x_row(p));
        else
            put_aside(team.acc, Split(p, shares, began.tile).part(p, shares, blockIdx.x));
    }
    // Where it shares in a sum, it does so once others have had time: the split tile it began with, and the one it ended with.
    const int begin = shares.start(blockIdx.x), end = shares.start(blockIdx.x + 1);
    const int last = p.whole + (end - 1) / p.U;
    at.tile = p.whole + begin / p.U;
    for (; begin < end && at.tile <= last; at.tile = max(at.tile + 1, last)) {
        const Split split(p, shares, at.tile);
        if (split.first < split.last) collect(p, shares, split, boxes, at.block(p), at.x_row(p));
    }
    if (threadIdx.x % TEAM_THREADS == 0) store_wait<0>();
}

template <class P, class Team> DEVICE void run(const P &p) {
    extern __shared__ __align__(1024) u8 ring[];
    u8 *boxes = ring + STAGES * P::STAGE_BYTES;
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
        keep_registers<P::COPIER_REGISTERS>();
        if (threadIdx.x == TEAMS * TEAM_THREADS) feed(p, ring, control, shares);
    } else {
        take_registers<P::TEAM_REGISTERS>();
        wait_for_inputs();
        multiply_all<P, Team>(p, ring, boxes, control, shares);
    }
}
