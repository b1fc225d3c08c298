// The instructions that C++ has no words for. Compiled by NVRTC without any header, for sm_90 and later.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(16) Words { u32 at[4]; };
struct alignas(16) Floats { float at[4]; };

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Barriers in shared memory that count arrivals and bytes (mbarrier); a wait names the parity of the phase it awaits.
DEVICE void barrier_init(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(u64 *barrier, bool is_due = true) {
    asm volatile("{\n.reg .pred due;\nsetp.ne.u32 due, %1, 0;\n@due mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                     shared_address(barrier)),
                 "r"(static_cast<u32>(is_due))
                 : "memory");
}

DEVICE void barrier_arrive_expect(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

DEVICE void barrier_wait(u64 *barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}

// A place in a ring of buffers, and the parity of its barriers' current phase.
template <int SIZE> struct Place {
    int stage = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

// The copy engine moves a run of bytes (a multiple of 16) to shared memory and counts them on the barrier.
DEVICE void copy_bulk(void *shared, const void *global, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// What the copy engine must know of a matrix in memory (CUtensorMap).
struct alignas(64) TensorMap { u64 opaque[16]; };

DEVICE void prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A box of the matrix, its first element at (column, row); what lies outside the matrix comes as zeros. Likewise of more
// dimensions, the nearest first.
DEVICE void copy_box(void *shared, const TensorMap *map, int column, int row, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                     "r"(shared_address(shared)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

DEVICE void copy_box(void *shared, const TensorMap *map, int c0, int c1, int c2, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(barrier))
                 : "memory");
}
DEVICE void copy_box(void *shared, const TensorMap *map, int c0, int c1, int c2, int c3, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier))
                 : "memory");
}

// The other way; what lies outside the matrix is not written. The bytes may be overwritten once no more than so many
// later batches are being read.
DEVICE void store_box(const TensorMap *map, int column, int row, const void *shared) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(column), "r"(row), "r"(shared_address(shared))
                 : "memory");
}
template <int PENDING> DEVICE void store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Ordinary writes to shared memory and barrier inits, before the copy engine uses them.
DEVICE void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier, one of 15, among so many threads of a thread block.
DEVICE void sync_some(int which, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory"); }

// Give registers of this warpgroup back, or take some that others gave.
template <int COUNT> DEVICE void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Programmatic dependent launch: let the next kernel start, and wait for what the last one wrote.
DEVICE void release_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void load_matrices(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrices(u32 (&out)[4], const void *shared) { load_matrices(out, shared_address(shared)); }

// Four 8 x 8 matrices of halves, each turned over its diagonal.
DEVICE void store_turned(void *shared, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared)),
                 "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// acc (16 x 8) += a (16 x 16) * b (16 x 8)
DEVICE void multiply(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if IS_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#endif
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same by a warpgroup: 4 warps with 16 rows each, all columns at once, b in shared memory as copy_box leaves it with
// its swizzle of 128 bytes: 64 inputs a row. Asynchronous: see group_begin, group_commit, group_wait.
//
// What names b is the low word of a descriptor: the address of the rows' first 16 inputs of those wanted, in units of 16
// bytes, so that it can be counted on. The high word says a stride of 1024 bytes between groups of 8 rows, swizzle mode 1.
//
// Where b is turned, its rows are the inputs, 64 columns each; more columns lie `next` bytes on.
DEVICE u32 describe(const void *b, u32 next = 16) { return (shared_address(b) & 0x3FFFFu) >> 4 | next >> 4 << 16; }
// Of blocks of 8 rows x 16 bytes: that of the next inputs lies 128 bytes on, that of the next rows (high word) 256.
DEVICE u32 describe_blocks(const void *b) { return describe(b, 128); }

#if IS_BF16
#define GROUP_TYPES ".f32.bf16.bf16"
#else
#define GROUP_TYPES ".f32.f16.f16"
#endif
#define SUM4_OF(sum) "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
#define SUM4(i) SUM4_OF(acc[i])
#define SUM16(i) SUM4(i), SUM4(i + 1), SUM4(i + 2), SUM4(i + 3)
#define TO11 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define TO15 TO11 ", %12, %13, %14, %15"
#define TO19 TO15 ", %16, %17, %18, %19"
#define TO23 TO19 ", %20, %21, %22, %23"
#define TO27 TO23 ", %24, %25, %26, %27"
#define TO31 TO27 ", %28, %29, %30, %31"
#define TO47 TO31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TO63 TO47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TO95                                                                                                             \
    TO63 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "   \
         "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TO127                                                                                                            \
    TO95 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, "    \
         "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GROUP_OF(COLUMNS, INPUTS, SUMS, A, B, LAST, HIGH)                                                                \
    "{\n.reg .b64 b;\nmov.b64 b, {" B ", " HIGH "};\nwgmma.mma_async.sync.aligned.m64n" COLUMNS INPUTS " {" SUMS         \
    "}, {" A "}, b, " LAST ";\n}"

// Halves by halves, 16 inputs; 8-bit floats (e4m3) by 8-bit floats, 32 inputs. In place of what the sums were unless ADDS.
// Float32 by float32, of which 11 bits count, 8 inputs; b lies as describe_blocks says.
#define MULTIPLY_GROUP(TILES, COLUMNS, SUMS, A, B, ADDED, IS_TURNED, ...)                                                \
    template <bool ADDS = true, bool TURNED = false>                                                                     \
    DEVICE void multiply_group(float (&acc)[TILES][4], const u32 (&a)[4], u32 b) {                                       \
        asm volatile(GROUP_OF(COLUMNS, "k16" GROUP_TYPES, SUMS, A, B, ADDED ", 1, 1, " IS_TURNED, "0x40000040")          \
                     : __VA_ARGS__                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADDS), "n"(TURNED));                      \
    }                                                                                                                    \
    template <bool ADDS> DEVICE void multiply_bytes(float (&acc)[TILES][4], const u32 (&a)[4], u32 b) {                  \
        asm volatile(GROUP_OF(COLUMNS, "k32.f32.e4m3.e4m3", SUMS, A, B, ADDED ", 1, 1", "0x40000040")                    \
                     : __VA_ARGS__                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADDS));                                   \
    }                                                                                                                    \
    DEVICE void multiply_floats(float (&acc)[TILES][4], const u32 (&a)[4], u32 b) {                                      \
        asm volatile(GROUP_OF(COLUMNS, "k8.f32.tf32.tf32", SUMS, A, B, "1, 1, 1", "0x00000010")                          \
                     : __VA_ARGS__                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                              \
    }

MULTIPLY_GROUP(3, "24", TO11, "%12, %13, %14, %15", "%16", "%17", "%18", SUM4(0), SUM4(1), SUM4(2))
MULTIPLY_GROUP(4, "32", TO15, "%16, %17, %18, %19", "%20", "%21", "%22", SUM16(0))
MULTIPLY_GROUP(5, "40", TO19, "%20, %21, %22, %23", "%24", "%25", "%26", SUM16(0), SUM4(4))
MULTIPLY_GROUP(6, "48", TO23, "%24, %25, %26, %27", "%28", "%29", "%30", SUM16(0), SUM4(4), SUM4(5))
MULTIPLY_GROUP(7, "56", TO27, "%28, %29, %30, %31", "%32", "%33", "%34", SUM16(0), SUM4(4), SUM4(5), SUM4(6))
MULTIPLY_GROUP(8, "64", TO31, "%32, %33, %34, %35", "%36", "%37", "%38", SUM16(0), SUM16(4))
MULTIPLY_GROUP(12, "96", TO47, "%48, %49, %50, %51", "%52", "%53", "%54", SUM16(0), SUM16(4), SUM16(8))
MULTIPLY_GROUP(16, "128", TO63, "%64, %65, %66, %67", "%68", "%69", "%70", SUM16(0), SUM16(4), SUM16(8), SUM16(12))
MULTIPLY_GROUP(24, "192", TO95, "%96, %97, %98, %99", "%100", "%101", "%102", SUM16(0), SUM16(4), SUM16(8), SUM16(12), SUM16(16),
               SUM16(20))
MULTIPLY_GROUP(32, "256", TO127, "%128, %129, %130, %131", "%132", "%133", "%134", SUM16(0), SUM16(4), SUM16(8), SUM16(12),
               SUM16(16), SUM16(20), SUM16(24), SUM16(28))

// Registers written before are seen by the multiplications after; those sent since the last commit are one batch; wait
// until no more than so many batches are under way.
DEVICE void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After a wait: keeps the compiler from reading sums before it.
template <int COLUMNS> DEVICE void settle(float (&acc)[COLUMNS][4]) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) asm volatile("" : SUM4_OF(acc[c])::"memory");
}
template <int ROWS, int COLUMNS> DEVICE void settle(float (&acc)[ROWS][COLUMNS][4]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) settle(acc[r]);
}

// No sums yet.
template <int COLUMNS> DEVICE void clear(float (&acc)[COLUMNS][4]) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[c][i] = 0.0f;
}
template <int ROWS, int COLUMNS> DEVICE void clear(float (&acc)[ROWS][COLUMNS][4]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) clear(acc[r]);
}

// Two halves at once: a - b.
DEVICE u32 subtract_pair(u32 a, u32 b) {
    u32 out;
#if IS_BF16
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#endif
    return out;
}

// Two halves at once: a * b.
DEVICE u32 multiply_pair(u32 a, u32 b) {
    u32 out;
#if IS_BF16
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#endif
    return out;
}

// Two halves at once: a * b + c, rounded once.
DEVICE u32 multiply_add_pair(u32 a, u32 b, u32 c) {
    u32 out;
#if IS_BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#endif
    return out;
}

// (word & mask) | bits in one instruction; written as C it becomes two.
DEVICE u32 select(u32 word, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
    return out;
}

// float32 to half, `low` in the low 16 bits, rounded to nearest.
DEVICE u32 round_pair(float low, float high) {
    u32 out;
#if IS_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
    return out;
}

// float32 to the 11 bits that count in a product.
DEVICE u32 round_tf32(float value) {
    u32 out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(value));
    return out;
}

DEVICE float widen(u16 half) {
#if IS_BF16
    return __uint_as_float(static_cast<u32>(half) << 16);
#else
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
    return out;
#endif
}

DEVICE float power_of_two(float exponent) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(exponent));
    return out;
}

// silu(gate) * up
DEVICE float apply_gate(float gate, float up) {
    return __fdividef(gate, 1.0f + power_of_two(gate * -1.44269504f)) * up; // log2(e)
}

// Count this thread block in, what its threads wrote before a barrier included; the count before it, and with it what the
// others wrote.
DEVICE int arrive_and_see(int *counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Past L1, which does not see what other multiprocessors wrote.
DEVICE Floats load_shared_work(const Floats *pointer) {
    Floats out;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.at[0]), "=f"(out.at[1]), "=f"(out.at[2]), "=f"(out.at[3])
                 : "l"(pointer)
                 : "memory");
    return out;
}

// What other multiprocessors may be writing or reading meanwhile. Of an ordinary load the assembler takes it that it gives the
// same again, and makes one turn of a loop that waits for it.
DEVICE Floats load_relaxed(const Floats *pointer) {
    Floats out;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.at[0]), "=f"(out.at[1]), "=f"(out.at[2]), "=f"(out.at[3])
                 : "l"(pointer)
                 : "memory");
    return out;
}
DEVICE void store_relaxed(Floats *pointer, float v0, float v1, float v2, float v3) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(v0), "f"(v1), "f"(v2), "f"(v3)
                 : "memory");
}

// Sums that thread blocks hand to each other say by themselves that they have come: before, and again once they were read, there
// lies a NaN that arithmetic never gives, its own having all bits but the sign. So they take one way through memory, with no
// fence and no count.
static constexpr u32 MISSING = 0xFFFFFFFFu;

DEVICE bool is_missing(const Floats &sums) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; i++) any |= __float_as_uint(sums.at[i]) == MISSING;
    return any;
}

DEVICE void clear_part(Floats *at) {
    const float missing = __uint_as_float(MISSING);
    store_relaxed(at, missing, missing, missing, missing);
}
