// Causal attention of prompts over the paged cache at the speed of the matrix units.
//
// A thread block takes 128 query rows (the heads of one KV head times some tokens of one sequence) and walks over the keys
// they see, KEYS at a time, with an online softmax (Milakov & Gimelshein 2018). One warp copies: queries, and keys and
// values by the block table, one KV block at a time, through the copy engine. Two warpgroups of 64 rows multiply; each
// multiplies the next keys while it weighs those before (Shah et al. 2024, "FlashAttention-3", section 3.2), and while one
// weighs, the other has the matrix unit. Thread blocks stay and claim pieces of work, the last tokens of the last sequence,
// which see the most keys, first.
//
// What lies behind a context in its last KV block is multiplied by zero: it must be finite.
//
// Compile-time: DIM 64 or 128, GROUP heads a KV head, BLOCK tokens a KV block, IS_BF16.

static constexpr int TEAMS = 2;
static constexpr int TEAM_WARPS = 4;
static constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
static constexpr int THREADS = TEAM_THREADS * (TEAMS + 1);
static constexpr int ROWS = 64 * TEAMS;
static constexpr int TOKENS = ROWS / GROUP; // of a piece of work
static constexpr int KEYS = 128;
static constexpr int STAGES = 2;
static constexpr int HALVES = DIM / 64; // a row's runs of 128 bytes, which the copy engine swizzles
static constexpr int HALF_BYTES = 128 * 128;
static constexpr int TILE_BYTES = HALVES * HALF_BYTES; // keys, values or queries
static constexpr u32 QUERY_BYTES = HALVES * TOKENS * GROUP * 128;
static_assert(KEYS == 128 && ROWS == 128, "all tiles are of 128 rows");

// Everything a launch is told.
struct Problem {
    TensorMap q;             // (T, heads, DIM), boxes of TOKENS x GROUP x 64
    TensorMap kv;            // (blocks, BLOCK, keys' heads and values' heads, DIM), boxes of 1 x BLOCK x 1 x 64
    u16 *out;                // (T, heads, DIM)
    const int *block_tables; // (S, table_stride)
    const int *context_lens; // (S,)
    const int *query_starts; // (S + 1,)
    int *claims;             // pieces of work claimed, thread blocks done; zero between launches
    float scale;             // times log2(e)
    int S, kv_heads, num_blocks, table_stride;
    int window;              // keys a query sees, itself included
    int programs;            // of one KV head; some are of no token
};

// A piece of work: what is not known from the numbers of the row.
struct Piece {
    int kv_head;          // below 0: there are no more
    int row;              // of the first token
    int tokens;           // that there are, up to TOKENS
    int position;         // of the first token
    int first, last;      // tiles [first, last) hold all keys that some token sees
    int sequence, length; // length: keys before the piece's last token, itself included
};

// Behind the tiles. Filled: bytes have come. Left: all warps are through with them.
struct Control {
    u64 keys_filled[STAGES], keys_left[STAGES], values_filled[STAGES], values_left[STAGES];
    u64 query_filled[2], query_left[2];
    Piece pieces[2];
};

// Sequence s has programs from query_starts[s] / TOKENS + s on. False for one without tokens.
DEVICE bool find(const Problem &p, int number, Piece &piece) {
    const int program = p.programs - 1 - number / p.kv_heads;
    int low = 0, high = p.S - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (p.query_starts[middle] / TOKENS + middle <= program)
            low = middle;
        else
            high = middle - 1;
    }
    const int start = p.query_starts[low], query_len = p.query_starts[low + 1] - start;
    const int token = (program - start / TOKENS - low) * TOKENS, before = p.context_lens[low] - query_len;
    piece.kv_head = number % p.kv_heads;
    piece.row = start + token;
    piece.tokens = min(TOKENS, query_len - token);
    piece.position = before + token;
    piece.sequence = low;
    piece.length = piece.position + piece.tokens;
    piece.first = max(piece.position - p.window + 1, 0) / KEYS;
    piece.last = (max(piece.length, 0) + KEYS - 1) / KEYS;
    return piece.tokens > 0;
}

// The next piece of work, the same for a warp.
DEVICE int claim(const Problem &p) {
    int number = 0;
    if (threadIdx.x % 32 == 0) number = gridDim.x + atomicAdd(p.claims, 1);
    return __shfl_sync(~0u, number, 0);
}

// The copying warp. Lane b brings the tile's KV block b.
DEVICE void feed(const Problem &p, u8 *keys, u8 *values, u8 *queries, Control &control) {
    const int lane = threadIdx.x % 32, pieces = p.programs * p.kv_heads;
    Place<STAGES> at;
    Place<2> turn;
    wait_for_inputs();
    int number = blockIdx.x;
    while (true) {
        Piece piece;
        const bool is_end = number >= pieces;
        const bool is_work = !is_end && find(p, number, piece);
        if (is_end) piece.kv_head = -1;
        if (!is_work && !is_end) {
            number = claim(p);
            continue;
        }
        barrier_wait(control.query_left + turn.stage, turn.parity ^ 1);
        if (lane == 0) {
            u64 *filled = control.query_filled + turn.stage;
            control.pieces[turn.stage] = piece;
            if (is_end)
                barrier_arrive(filled);
            else
                barrier_arrive_expect(filled, QUERY_BYTES);
            for (int half = 0; half < HALVES && !is_end; half++)
                copy_box(queries + turn.stage * TILE_BYTES + half * HALF_BYTES, &p.q, half * 64, piece.kv_head * GROUP,
                         piece.row, filled);
        }
        if (is_end) break;
        turn.advance();
        for (int tile = piece.first; tile < piece.last; tile++, at.advance()) {
            const int block = tile * (KEYS / BLOCK) + lane;
            const bool copies = lane < KEYS / BLOCK;
            int from = p.num_blocks; // beyond the last, where there are zeros
            if (copies && block * BLOCK < piece.length) from = p.block_tables[piece.sequence * p.table_stride + block];
#pragma unroll
            for (int part = 0; part < 2; part++) { // keys, then values
                u64 *filled = (part ? control.values_filled : control.keys_filled) + at.stage;
                u8 *to = (part ? values : keys) + at.stage * TILE_BYTES + lane * (BLOCK * 128);
                barrier_wait((part ? control.values_left : control.keys_left) + at.stage, at.parity ^ 1);
                if (lane == 0) barrier_arrive_expect(filled, TILE_BYTES);
                __syncwarp();
                for (int half = 0; half < HALVES && copies; half++)
                    copy_box(to + half * HALF_BYTES, &p.kv, half * 64, part * p.kv_heads + piece.kv_head, 0, from, filled);
            }
        }
        number = claim(p); // not earlier, or who is late would find nothing left
    }
    // The last thread block leaves the counts as it found them.
    if (lane == 0 && arrive_and_see(p.claims + 1) == static_cast<int>(gridDim.x) - 1) p.claims[0] = p.claims[1] = 0;
}

// A team's 64 queries as the matrix unit's first operand.
DEVICE void load_query(u32 (&query)[DIM / 16][4], const u8 *tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        const int piece = step % 4 * 2 + lane / 16;
        load_matrices(query[step], tile + step / 4 * HALF_BYTES + row * 128 + ((piece ^ (row & 7)) << 4));
    }
}

// Scores of KEYS keys; under way on return.
DEVICE void multiply_keys(float (&scores)[KEYS / 8][4], const u32 (&query)[DIM / 16][4], const u8 *tile) {
    const u32 keys = describe(tile);
    group_begin();
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        const u32 at = keys + (step / 4 * HALF_BYTES + step % 4 * 32 >> 4);
        if (step == 0)
            multiply_group<false>(scores, query[step], at);
        else
            multiply_group(scores, query[step], at);
    }
    group_commit();
}

// acc += weights * values; under way on return.
DEVICE void multiply_values(float (&acc)[DIM / 8][4], const u32 (&weights)[KEYS / 16][4], const u8 *tile) {
    const u32 values = describe(tile, HALF_BYTES);
    group_begin();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        multiply_group<true, true>(acc, weights[step], values + step * (16 * 128 >> 4));
    group_commit();
}

#define HIDDEN __int_as_float(0xFF800000) // minus infinity

// A thread's two rows, 8 apart: their positions, highest scores, and the sums of what the thread has weighed of them.
struct Rows {
    int position[2];
    float peak[2] = {HIDDEN, HIDDEN}, total[2] = {0.0f, 0.0f};
};

// Scores become weights against the highest so far; `fade` is what sums made before are to be multiplied by.
DEVICE void weigh(float (&scores)[KEYS / 8][4], Rows &rows, float (&fade)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float highest = rows.peak[h];
#pragma unroll
        for (int nt = 0; nt < KEYS / 8; nt++) highest = fmaxf(highest, fmaxf(scores[nt][2 * h], scores[nt][2 * h + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        const float anchor = highest == HIDDEN ? 0.0f : highest * scale; // a row that has seen nothing yet
        fade[h] = power_of_two(rows.peak[h] * scale - anchor);
        rows.peak[h] = highest;
        float sum = 0.0f;
#pragma unroll
        for (int nt = 0; nt < KEYS / 8; nt++)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; i++) sum += scores[nt][i] = power_of_two(scores[nt][i] * scale - anchor);
        rows.total[h] = rows.total[h] * fade[h] + sum;
    }
}

DEVICE void hide(float (&scores)[KEYS / 8][4], const Rows &rows, int first_key, int window) {
    const int lane_key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < KEYS / 8; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int behind = rows.position[i / 2] - (lane_key + nt * 8 + i % 2);
            if (behind < 0 || behind >= window) scores[nt][i] = HIDDEN;
        }
}

// Weights as the matrix unit's first operand: sums lie in the lanes just as it wants them.
DEVICE void round_weights(u32 (&out)[KEYS / 16][4], const float (&weights)[KEYS / 8][4]) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&from)[4] = weights[step * 2 + i / 2];
            out[step][i] = round_pair(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
}

DEVICE void fade_sums(float (&acc)[DIM / 8][4], const float (&fade)[2]) {
#pragma unroll
    for (int nt = 0; nt < DIM / 8; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[nt][i] *= fade[i / 2];
}

DEVICE void store(const Problem &p, const Piece &piece, float (&acc)[DIM / 8][4], const Rows &rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float total = rows.total[h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const float share = total == 0.0f ? 0.0f : 1.0f / total;
        const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * h, token = row / GROUP;
        if (token >= piece.tokens) continue;
        const size_t head = static_cast<size_t>(piece.row + token) * p.kv_heads * GROUP + piece.kv_head * GROUP + row % GROUP;
        u32 *out = reinterpret_cast<u32 *>(p.out + head * DIM) + lane % 4;
#pragma unroll
        for (int nt = 0; nt < DIM / 8; nt++)
            out[nt * 4] = round_pair(acc[nt][2 * h] * share, acc[nt][2 * h + 1] * share);
    }
}

// One team's walk over a piece's keys.
DEVICE void attend(const Problem &p, const Piece &piece, const u32 (&query)[DIM / 16][4], const u8 *keys, const u8 *values,
                   Control &control, Place<STAGES> &at) {
    const int team = threadIdx.x / TEAM_THREADS, first_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const bool speaks = threadIdx.x % 32 == 0;
    // Tokens [first, last) are this team's. Keys after the last of them are of no use to it.
    const int first = team * 64 / GROUP, last = min((team * 64 + 63) / GROUP + 1, piece.tokens);
    const int wanted = first >= last ? 0 : (max(piece.position + last, 0) + KEYS - 1) / KEYS;
    const int end = min(max(wanted, piece.first), piece.last);
    float acc[DIM / 8][4] = {};
    float scores[KEYS / 8][4], fade[2];
    u32 weights[KEYS / 16][4];
    Rows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) rows.position[h] = piece.position + (first_row + 8 * h) / GROUP;
    const int least = piece.position + first, most = piece.position + last - 1;
    const auto look = [&](int tile) {
        settle(scores);
        barrier_arrive(control.keys_left + at.stage, speaks);
        if ((tile + 1) * KEYS - 1 > least || tile * KEYS <= most - p.window) hide(scores, rows, tile * KEYS, p.window);
        weigh(scores, rows, fade, p.scale);
    };
    if (piece.first < end) {
        barrier_wait(control.keys_filled + at.stage, at.parity);
        multiply_keys(scores, query, keys + at.stage * TILE_BYTES);
        group_wait<0>();
        look(piece.first);
        round_weights(weights, scores);
        for (int tile = piece.first + 1; tile < end; tile++) {
            const Place<STAGES> before = at;
            at.advance();
            barrier_wait(control.keys_filled + at.stage, at.parity);
            barrier_wait(control.values_filled + before.stage, before.parity);
            multiply_keys(scores, query, keys + at.stage * TILE_BYTES);
            multiply_values(acc, weights, values + before.stage * TILE_BYTES);
            group_wait<1>();
            look(tile);
            group_wait<0>();
            settle(acc);
            barrier_arrive(control.values_left + before.stage, speaks);
            fade_sums(acc, fade);
            round_weights(weights, scores);
        }
        barrier_wait(control.values_filled + at.stage, at.parity);
        multiply_values(acc, weights, values + at.stage * TILE_BYTES);
        group_wait<0>();
        settle(acc);
        barrier_arrive(control.values_left + at.stage, speaks);
        at.advance();
    }
    store(p, piece, acc, rows);
    for (int tile = end; tile < piece.last; tile++, at.advance()) {
        barrier_wait(control.keys_filled + at.stage, at.parity);
        barrier_arrive(control.keys_left + at.stage, speaks);
        barrier_wait(control.values_filled + at.stage, at.parity);
        barrier_arrive(control.values_left + at.stage, speaks);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_many(const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 keys[];
    u8 *values = keys + STAGES * TILE_BYTES, *queries = values + STAGES * TILE_BYTES;
    Control &control = *reinterpret_cast<Control *>(queries + 2 * TILE_BYTES);
    release_dependents();
    if (threadIdx.x < 2) {
        barrier_init(control.keys_filled + threadIdx.x, 1);
        barrier_init(control.keys_left + threadIdx.x, TEAMS * TEAM_WARPS);
        barrier_init(control.values_filled + threadIdx.x, 1);
        barrier_init(control.values_left + threadIdx.x, TEAMS * TEAM_WARPS);
        barrier_init(control.query_filled + threadIdx.x, 1);
        barrier_init(control.query_left + threadIdx.x, TEAMS * TEAM_WARPS);
    }
    fence_for_copies();
    __syncthreads();
    // The compiler takes what lane 0 says as the same for a warp.
    if (__shfl_sync(~0u, threadIdx.x / TEAM_THREADS, 0) == TEAMS) {
        keep_registers<40>();
        if (threadIdx.x < TEAMS * TEAM_THREADS + 32) feed(p, keys, values, queries, control);
    } else {
        take_registers<232>();
        wait_for_inputs(); // as long as `out` may still be read
        Place<STAGES> at;
        for (Place<2> turn;; turn.advance()) {
            barrier_wait(control.query_filled + turn.stage, turn.parity);
            const Piece piece = control.pieces[turn.stage];
            if (piece.kv_head < 0) break;
            u32 query[DIM / 16][4];
            load_query(query, queries + turn.stage * TILE_BYTES);
            barrier_arrive(control.query_left + turn.stage, threadIdx.x % 32 == 0);
            attend(p, piece, query, keys, values, control, at);
        }
    }
}
