// Attention of one query a sequence over the paged cache, after the rotary turn and the write of its own key and value.
//
// A thread block has the query heads of one KV head of one sequence, and a share of the keys; its warps take 16 keys at a
// time in turn. Scores are keys times queries, 16 x 8, the result is values times weights, so heads ride the short side
// of the matrix instruction. Keys and values go from memory to the registers in which it wants them: a lane's 16 bytes are
// taken for dimensions that are multiplied together anyhow, since their order does not matter while queries have the same.
// Pairs of values are interleaved there; weights are turned over their diagonal by one instruction.
//
// Sums of warps meet in shared memory. A short context is one thread block's, the others of the sequence leave; of a long
// one the last block to come weighs all shares, in their order, so the result does not depend on timing.
//
// Compile-time: DIM (64 or 128), GROUP query heads of a KV head (1 to 8), BLOCK keys of a KV block, WARPS (4 or 8), LEAST
// tiles of 16 keys that are worth a thread block, HAS_NORMS, IS_BF16.

static constexpr int THREADS = 32 * WARPS;
static constexpr int KEYS = 16;
static constexpr int HEADS = 8; // of a product, those past GROUP are zero
static constexpr int QUERY_STRIDE = DIM + 32; // halves; two heads' pieces lie in different banks
static constexpr int SUM_STRIDE = DIM + 4; // floats; likewise
static constexpr int ITEMS = GROUP * DIM / 4; // of a result, four floats each
static constexpr int OWN = (ITEMS + THREADS - 1) / THREADS; // of them a thread's
static constexpr int RESIDENT = WARPS == 8 ? 2 : 3; // thread blocks of a multiprocessor, as many as registers leave
static constexpr int IDS = 16; // tiles whose block ids a warp holds

// T tokens, one each of the sequences that have any.
struct Problem {
    const u16 *q;                    // (T, heads, DIM)
    const u16 *k, *v;                // (T, kv_heads, DIM)
    const float *cos, *sin;          // (T, DIM / 2)
    const long long *slots;          // (T,), below 0: the key and value are not written
    const u16 *q_norm, *k_norm;      // (DIM,)
    u16 *cache;                      // (blocks, BLOCK, 2, kv_heads, DIM)
    const int *tables, *lengths, *starts;
    u16 *out;                        // (T, heads, DIM)
    Floats *parts;                   // (sequences, kv_heads, splits, ITEMS + GROUP)
    int *arrived;                    // (sequences, kv_heads), all zero between launches
    long long block_stride;
    int token_stride, q_stride, k_stride, v_stride, table_stride;
    int kv_heads, splits, window;
    float scale, eps;
};

#define LOWEST __int_as_float(0xFF800000) // minus infinity

struct Shared {
    alignas(16) u16 queries[HEADS][QUERY_STRIDE];
    alignas(16) u16 key[DIM], value[DIM]; // of this step
    alignas(16) float sums[WARPS][GROUP][SUM_STRIDE];
    float peaks[WARPS][HEADS], totals[WARPS][HEADS];
    int is_last;
};

DEVICE Words load_words(const u16 *pointer) {
    Words out;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.at[0]), "=r"(out.at[1]), "=r"(out.at[2]), "=r"(out.at[3])
                 : "l"(pointer));
    return out;
}

// Read where it is written, lest the compiler hold it in registers from before.
DEVICE Words shared_words(const u16 *pointer) {
    Words out;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.at[0]), "=r"(out.at[1]), "=r"(out.at[2]), "=r"(out.at[3])
                 : "r"(shared_address(pointer))
                 : "memory");
    return out;
}

// 8 x 8 halves over their diagonal, across a warp.
DEVICE u32 turn_over(u32 matrix) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Keys [first, last) in tiles [begin, end) of this thread block.
struct Share {
    int first, last, begin, end, used;
    DEVICE Share(int length, int window, int splits, int split) : last(length) {
        first = max(length - window, 0);
        const int first_tile = first / KEYS, tiles = (length + KEYS - 1) / KEYS - first_tile;
        used = min(splits, (tiles + LEAST - 1) / LEAST);
        begin = first_tile, end = first_tile;
        if (split < used) begin += tiles * split / used, end += tiles * (split + 1) / used;
    }
};

// The block ids of a warp's next tiles, both halves of each: lane l holds that of half l % 2 of the (l / 2)-th.
DEVICE int find_blocks(const int *table, int tile, const Share &share) {
    const int lane = threadIdx.x % 32;
    const int key = (tile + lane / 2 * WARPS) * KEYS + lane % 2 * 8;
    return table[min(key, share.last - 1) / BLOCK];
}

// Where a lane's keys and values lie within a tile, and which tile's.
struct Rows {
    const u16 *keys, *values;
    long long block_stride;
    int token_stride;

    DEVICE Rows(const Problem &p, int kv_head) : block_stride(p.block_stride), token_stride(p.token_stride) {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        keys = p.cache + kv_head * DIM + g * token_stride + c * 8;
        values = p.cache + (p.kv_heads + kv_head) * DIM + 2 * c * token_stride + g * 8;
    }

    // Of the halves of a tile; `ids` as from find_blocks, of which `which` is the tile's.
    DEVICE void find(long long (&halves)[2], int tile, int ids, int which) const {
#pragma unroll
        for (int h = 0; h < 2; h++)
            halves[h] = __shfl_sync(0xFFFFFFFFu, ids, which * 2 + h) * block_stride +
                        (tile * KEYS + h * 8) % BLOCK * token_stride;
    }
};

// Lane (g, c) = (lane / 4, lane % 4) holds of keys g and g + 8 the dimensions 32 i + 8 c ... + 7.
struct Keys {
    Words at[2][DIM / 32];
    DEVICE void load(const Rows &rows, const long long (&halves)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) at[h][i] = load_words(rows.keys + halves[h] + i * 32);
    }
};

// And of values 2 c, 2 c + 1, 2 c + 8, 2 c + 9 the dimensions 64 i + 8 g ... + 7.
struct Values {
    Words at[4][DIM / 64];
    DEVICE void load(const Rows &rows, const long long (&halves)[2]) {
#pragma unroll
        for (int h = 0; h < 4; h++)
#pragma unroll
            for (int i = 0; i < DIM / 64; i++)
                at[h][i] = load_words(rows.values + halves[h / 2] + h % 2 * rows.token_stride + i * 64);
    }
};

// What a warp has seen: lane (g, c) holds of heads 2 c and 2 c + 1 the peak, its own keys' total, and the sums of
// dimensions 64 i + 8 g + 2 j (places 0, 1) and the one after (2, 3).
struct Seen {
    float peak[2], total[2], sums[DIM / 64][4][4];
};

static constexpr int HALF = DIM / 2;
static constexpr int EACH = HALF / 32; // elements of either half that a lane turns

template <class T> struct alignas(EACH * sizeof(T)) Some { T at[EACH]; };
template <class T> DEVICE Some<T> some_of(const T *pointer) { return *reinterpret_cast<const Some<T> *>(pointer); }
DEVICE void put_some(u16 *pointer, const Some<u16> &some) { *reinterpret_cast<Some<u16> *>(pointer) = some; }

// What a warp turns: query heads, the key, and the value, which it only copies; every WARPS-th of these.
struct Turn {
    static constexpr int ROUNDS = (GROUP + 2 + WARPS - 1) / WARPS;
    const u16 *from[ROUNDS];
    Some<float> cos, sin;
    long long slot;

    DEVICE Turn(const Problem &p, int row, int kv_head) : slot(p.slots[row]) {
        const int warp = threadIdx.x / 32, at = threadIdx.x % 32 * EACH;
        const long long wide_row = row;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int job = r * WARPS + warp;
            from[r] = job < GROUP    ? p.q + wide_row * p.q_stride + (kv_head * GROUP + job) * DIM
                      : job == GROUP ? p.k + wide_row * p.k_stride + kv_head * DIM
                                     : p.v + wide_row * p.v_stride + kv_head * DIM;
            from[r] += at;
        }
        cos = some_of(p.cos + wide_row * HALF + at), sin = some_of(p.sin + wide_row * HALF + at);
    }

    // Into shared memory, as they are used; key and value, where this thread block has the last keys, into the cache, too.
    DEVICE void run(const Problem &p, Shared &s, int kv_head, bool has_own) const {
        const int warp = threadIdx.x / 32, at = threadIdx.x % 32 * EACH;
        Some<u16> raw[ROUNDS][2];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) raw[r][0] = some_of(from[r]), raw[r][1] = some_of(from[r] + HALF);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int job = r * WARPS + warp;
            if (job >= GROUP + (has_own ? 2 : 0)) break;
            if (job <= GROUP) turn(p, raw[r], job == GROUP ? p.k_norm : p.q_norm);
            u16 *to = job < GROUP ? s.queries[job] : job == GROUP ? s.key : s.value;
            put_some(to + at, raw[r][0]), put_some(to + HALF + at, raw[r][1]);
            if (job < GROUP || slot < 0) continue;
            u16 *kept = p.cache + slot / BLOCK * p.block_stride + slot % BLOCK * p.token_stride +
                        ((job - GROUP) * p.kv_heads + kv_head) * DIM + at;
            put_some(kept, raw[r][0]), put_some(kept + HALF, raw[r][1]);
        }
    }

    DEVICE void turn(const Problem &p, Some<u16> (&raw)[2], const u16 *norm) const {
        float part[2][EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) part[0][i] = widen(raw[0].at[i]), part[1][i] = widen(raw[1].at[i]);
#if HAS_NORMS
        norm += threadIdx.x % 32 * EACH;
        const Some<u16> norms[2] = {some_of(norm), some_of(norm + HALF)};
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) squares += part[0][i] * part[0][i] + part[1][i] * part[1][i];
#pragma unroll
        for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, d);
        const float factor = 1.0f / sqrtf(squares / DIM + p.eps);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                part[h][i] = widen(static_cast<u16>(round_pair(part[h][i] * factor * widen(norms[h].at[i]), 0.0f)));
#endif
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u32 pair = round_pair(part[0][i] * cos.at[i] - part[1][i] * sin.at[i],
                                        part[1][i] * cos.at[i] + part[0][i] * sin.at[i]);
            raw[0].at[i] = static_cast<u16>(pair), raw[1].at[i] = static_cast<u16>(pair >> 16);
        }
    }
};

// The last tile's own key and value, which memory does not have yet.
DEVICE void take_own(const Shared &s, int own, Keys &keys, Values &values) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (own == g + h * 8)
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) keys.at[h][i] = shared_words(s.key + i * 32 + c * 8);
#pragma unroll
    for (int h = 0; h < 4; h++)
        if (own == 2 * c + h / 2 * 8 + h % 2)
#pragma unroll
            for (int i = 0; i < DIM / 64; i++) values.at[h][i] = shared_words(s.value + i * 64 + g * 8);
}

// A tile's weights, as the second operand of values times weights; `seen` is faded to their peak.
DEVICE void weigh(const Problem &p, const Shared &s, const Share &share, int tile, const Keys &keys, Seen &seen,
                  u32 (&weights)[2]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float score[4] = {}, other[4] = {};
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        const Words query = shared_words(&s.queries[g][i * 32 + c * 8]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 a[4] = {keys.at[0][i].at[2 * h], keys.at[1][i].at[2 * h], keys.at[0][i].at[2 * h + 1],
                              keys.at[1][i].at[2 * h + 1]};
            multiply(h ? other : score, a, query.at[2 * h], query.at[2 * h + 1]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int key = tile * KEYS + h * 8 + g;
        const bool is_seen = key >= share.first && key < share.last;
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; j++) score[j] = is_seen ? (score[j] + other[j]) * p.scale : LOWEST;
    }
    float fade[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float peak = fmaxf(score[j], score[2 + j]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, d));
        peak = fmaxf(peak, seen.peak[j]);
        fade[j] = power_of_two(seen.peak[j] - peak);
        seen.peak[j] = peak;
        score[j] = power_of_two(score[j] - peak), score[2 + j] = power_of_two(score[2 + j] - peak);
        seen.total[j] = seen.total[j] * fade[j] + (score[j] + score[2 + j]);
    }
    weights[0] = turn_over(round_pair(score[0], score[1]));
    weights[1] = turn_over(round_pair(score[2], score[3]));
#pragma unroll
    for (int i = 0; i < DIM / 64; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) seen.sums[i][j][k] *= fade[k % 2];
}

DEVICE void add_values(const Values &values, const u32 (&weights)[2], Seen &seen) {
#pragma unroll
    for (int i = 0; i < DIM / 64; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 w[4] = {values.at[0][i].at[j], values.at[1][i].at[j], values.at[2][i].at[j], values.at[3][i].at[j]};
            const u32 a[4] = {low_halves(w[0], w[1]), high_halves(w[0], w[1]), low_halves(w[2], w[3]),
                              high_halves(w[2], w[3])};
            multiply(seen.sums[i][j], a, weights[0], weights[1]);
        }
}

// A warp's sums into shared memory, four dimensions at a time.
DEVICE void put_sums(Shared &s, const Seen &seen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float total = seen.total[j];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, d);
        const int head = 2 * c + j;
        if (g == 0) s.peaks[warp][head] = seen.peak[j], s.totals[warp][head] = total;
        if (head >= GROUP) continue;
#pragma unroll
        for (int i = 0; i < DIM / 64; i++)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const float(&sums)[4][4] = seen.sums[i];
                const Floats four = {sums[k][j], sums[k][2 + j], sums[k + 1][j], sums[k + 1][2 + j]};
                *reinterpret_cast<Floats *>(&s.sums[warp][head][i * 64 + g * 8 + k * 2]) = four;
            }
    }
}

// Shares of a softmax, added in their order. One that saw nothing has the lowest peak.
struct Mixture {
    float peak = LOWEST, total = 0.0f;
    Floats sums = {};
    template <int N> DEVICE void add(const float (&peaks)[N], const float (&totals)[N], const Floats (&parts)[N]) {
        const float before = peak;
#pragma unroll
        for (int n = 0; n < N; n++) peak = fmaxf(peak, peaks[n]);
        const float fade = power_of_two(before - peak);
        total *= fade;
#pragma unroll
        for (int k = 0; k < 4; k++) sums.at[k] *= fade;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float weight = power_of_two(peaks[n] - peak);
            total += totals[n] * weight;
#pragma unroll
            for (int k = 0; k < 4; k++) sums.at[k] += parts[n].at[k] * weight;
        }
    }
};

DEVICE void store(const Problem &p, int row, int kv_head, int item, const Mixture &mixture) {
    u16 *heads = p.out + (static_cast<long long>(row) * p.kv_heads + kv_head) * (GROUP * DIM);
    u32 *out = reinterpret_cast<u32 *>(heads) + item * 2;
    const float factor = __fdividef(1.0f, mixture.total);
    out[0] = round_pair(mixture.sums.at[0] * factor, mixture.sums.at[1] * factor);
    out[1] = round_pair(mixture.sums.at[2] * factor, mixture.sums.at[3] * factor);
}

// Put this share aside; the last to come weighs them all.
DEVICE void join(const Problem &p, Shared &s, int pair, int row, int kv_head, int split, int used,
                 const Mixture (&own)[OWN]) {
    Floats *parts = p.parts + static_cast<long long>(pair) * p.splits * (ITEMS + GROUP);
    Floats *mine = parts + split * (ITEMS + GROUP);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int item = threadIdx.x + i * THREADS;
        if (item >= ITEMS) break;
        mine[item] = own[i].sums;
        if (item % (DIM / 4) == 0) mine[ITEMS + item / (DIM / 4)] = {own[i].peak, own[i].total, 0.0f, 0.0f};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s.is_last = arrive_and_see(p.arrived + pair) == used - 1;
        if (s.is_last) p.arrived[pair] = 0;
    }
    __syncthreads();
    if (!s.is_last) return;
    constexpr int AT_ONCE = 8;
    for (int item = threadIdx.x; item < ITEMS; item += THREADS) {
        Mixture mixture;
        for (int first = 0; first < used; first += AT_ONCE) {
            float peaks[AT_ONCE], totals[AT_ONCE];
            Floats sums[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const Floats *theirs = parts + min(first + k, used - 1) * (ITEMS + GROUP);
                sums[k] = load_shared_work(theirs + item);
                const Floats weights = load_shared_work(theirs + ITEMS + item / (DIM / 4));
                peaks[k] = first + k < used ? weights.at[0] : LOWEST, totals[k] = weights.at[1];
            }
            mixture.add(peaks, totals, sums);
        }
        store(p, row, kv_head, item, mixture);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) paged_attend_one(const __grid_constant__ Problem p) {
    __shared__ Shared s;
    release_dependents();
    const int sequence = blockIdx.y, kv_head = blockIdx.x % p.kv_heads, split = blockIdx.x / p.kv_heads;
    const int warp = threadIdx.x / 32;
    // All but this step's queries, keys and values was there before the step's first kernels ended: the kernel ahead need
    // not be waited for yet.
    const int row = p.starts[sequence], end = p.starts[sequence + 1], length = p.lengths[sequence];
    const Share share(length, p.window, p.splits, split);
    const bool is_empty = length == 0, has_own = split == share.used - 1;
    if (end == row || split >= max(share.used, 1)) return;
    if (is_empty) {
        wait_for_inputs();
        Mixture nothing;
        nothing.total = 1.0f;
        for (int item = threadIdx.x; item < ITEMS; item += THREADS) store(p, row, kv_head, item, nothing);
        return;
    }
    for (int at = GROUP * QUERY_STRIDE + threadIdx.x; at < HEADS * QUERY_STRIDE; at += THREADS) s.queries[0][at] = 0;
    const int *table = p.tables + static_cast<long long>(sequence) * p.table_stride;
    const Rows rows(p, kv_head);
    int tile = share.begin + warp, which = 0, ids = 0;
    long long halves[2];
    Keys keys;
    Values values;
    if (tile < share.end) {
        ids = find_blocks(table, tile, share);
        rows.find(halves, tile, ids, which);
        keys.load(rows, halves);
        values.load(rows, halves);
    }
    const Turn turn(p, row, kv_head);
    wait_for_inputs();
    turn.run(p, s, kv_head, has_own);
    __syncthreads();
    Seen seen = {{LOWEST, LOWEST}};
    while (tile < share.end) {
        const int next = tile + WARPS;
        if (has_own && tile == (length - 1) / KEYS) take_own(s, (length - 1) % KEYS, keys, values);
        u32 weights[2];
        weigh(p, s, share, tile, keys, seen, weights);
        if (next < share.end) {
            if (++which == IDS) which = 0, ids = find_blocks(table, next, share);
            rows.find(halves, next, ids, which);
            keys.load(rows, halves);
        }
        add_values(values, weights, seen);
        if (next < share.end) values.load(rows, halves);
        tile = next;
    }
    put_sums(s, seen);
    __syncthreads();
    Mixture mixture[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int item = min(static_cast<int>(threadIdx.x) + i * THREADS, ITEMS - 1), head = item / (DIM / 4);
        float peaks[WARPS], totals[WARPS];
        Floats sums[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            peaks[w] = s.peaks[w][head], totals[w] = s.totals[w][head];
            sums[w] = *reinterpret_cast<const Floats *>(&s.sums[w][head][item % (DIM / 4) * 4]);
        }
        mixture[i].add(peaks, totals, sums);
        if (share.used == 1 && threadIdx.x + i * THREADS < ITEMS) store(p, row, kv_head, item, mixture[i]);
    }
    if (share.used > 1) join(p, s, sequence * p.kv_heads + kv_head, row, kv_head, split, share.used, mixture);
}
