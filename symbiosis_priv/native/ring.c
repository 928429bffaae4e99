/* One translation unit: everything that symbiosis_priv compiles. See common.h for the rules. */
#include "amx.h"
#include "common.h"
#include "few.h"
#include "lattice.h"
#include "local.h"
#include "narrow.h"
#include "passes.h"
#include "product.h"

#if HAVE_AVXVNNI
#include <cpuid.h>

/* Asked of the CPU itself: compilers learned the name "avxvnni" for __builtin_cpu_supports later than the instruction. */
static int has_avxvnni(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 4));
}
#endif

#if HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* The CPU has the instructions, and the system saves the tiles of this process: `system/amx.py` asks it to. Not decided here is
 * whether they work. A virtual machine may lack CPUID leaf 0x1D, which describes the tiles, and have them. */
static int has_amx(void) {
#ifdef RING_EMULATE_TILES
    return 1;
#endif
    enum { CPUID_TILE = 1 << 24, CPUID_INT8 = 1 << 25, CPUID_XGETBV = 1 << 27, TILE_STATES = 3 << 17, TILE_DATA = 1 << 18 };
    enum { ARCH_GET_XCOMP_PERM = 0x1022 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & CPUID_XGETBV)) return 0;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    if ((eax & TILE_STATES) != TILE_STATES) return 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & CPUID_TILE) || !(edx & CPUID_INT8)) return 0;
    uint64_t permitted = 0;
    return !syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &permitted) && (permitted & TILE_DATA);
}
#endif

/* SHA-256 over the sources this library was built from, so that the loader knows a stale one. */
EXPORT const char *ring_source_digest(void) { return SOURCE_DIGEST; }

/* Bit i is set if this CPU has instruction set i (and an operating system that saves its registers). */
EXPORT uint32_t ring_isas(void) {
    uint32_t isas = 1u << ISA_PORTABLE;
#if HAVE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return isas;
    isas |= 1u << ISA_AVX2;
#if HAVE_AVXVNNI
    if (has_avxvnni()) isas |= 1u << ISA_AVXVNNI;
#endif
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        isas |= 1u << ISA_AVX512;
#if HAVE_AMX
    if (isas >> ISA_AVX512 & 1 && __builtin_cpu_supports("avx512vbmi") && has_amx()) isas |= 1u << ISA_AMX;
#endif
#endif
    return isas;
}

#if HAVE_AMX
/* Returns 1 if AMX computes some products as plain C does: in both directions, with weights of each size, in both rings, with
 * full and partial tiles. May end the process with SIGILL, so a child process calls it. */
EXPORT int32_t ring_amx_works(void) {
    enum { OUTPUTS = 150, INPUTS = 600, COUNT = 17, MOST = 640, PADDED = 32 };
    static int16_t weight[OUTPUTS * INPUTS];
    static int32_t rows[COUNT * MOST], limbs[PADDED * MOST], got[COUNT * MOST], want[COUNT * MOST];
    static _Alignas(64) char panels[192 * 640 * 2];
    uint32_t random = 1;
    for (int i = 0; i < COUNT * MOST; i++) {
        random = random * 1664525u + 1013904223u;
        rows[i] = (int32_t)(random ^ random >> 16);
    }
    for (int test = 0; test < 12; test++) {
        int wide = test % 3, weight_bits = wide == 2 ? 16 : 8 + 2 * wide, backward = test / 3 & 1, bits = test >= 6 ? 24 : 32;
        int64_t width = backward ? OUTPUTS : INPUTS, columns = backward ? INPUTS : OUTPUTS, tiles = tiles_of(columns);
        for (int i = 0; i < OUTPUTS * INPUTS; i++) {
            random = random * 1664525u + 1013904223u;
            weight[i] = (int16_t)((int32_t)random >> (weight_bits == 16 ? 17 : 32 - weight_bits));
        }
        ring_pack(weight, OUTPUTS, INPUTS, weight_bits, panels);
        ring_split(ISA_PORTABLE, 32, weight_bits, rows, COUNT, width, limbs);
        ring_product(ISA_PORTABLE, 32, backward, panels, weight_bits, OUTPUTS, INPUTS, limbs, COUNT, want, 0, tiles);
        ring_split(ISA_AMX, bits, weight_bits, rows, COUNT, width, limbs);
        ring_product(ISA_AMX, bits, backward, panels, weight_bits, OUTPUTS, INPUTS, limbs, COUNT, got, 0, tiles);
        for (int64_t i = 0; i < COUNT * columns; i++)
            if (((uint32_t)got[i] ^ (uint32_t)want[i]) << (32 - bits)) return 0;
    }
    return 1;
}
#endif
