/* One translation unit: everything that symbiosis_priv compiles. See common.h for the rules. */
#include "common.h"
#include "passes.h"

/* SHA-256 over the sources this library was built from, so that the loader knows a stale one. */
EXPORT const char *ring_source_digest(void) { return SOURCE_DIGEST; }

/* The best instruction set of this CPU (and of an operating system that saves its registers). */
EXPORT int32_t ring_best_isa(void) {
#if HAVE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_PORTABLE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return ISA_AVX512;
    return ISA_AVX2;
#else
    return ISA_PORTABLE;
#endif
}
