/* One translation unit: everything that symbiosis_priv compiles. See common.h for the rules. */
#include "common.h"
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
#endif
    return isas;
}
