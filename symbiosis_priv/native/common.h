/* What every part of the library shares. The library has no state and no threads: callers slice the work and call it
 * from threads of their own. Nothing here knows Python or torch. */
#ifndef SYMBIOSIS_COMMON_H
#define SYMBIOSIS_COMMON_H

#include <stdint.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#else
#define HAVE_X86 0
#endif

#define EXPORT __attribute__((visibility("default")))

/* Instruction sets that functions are written for, as their `isa` argument. Each includes those before it.
 * Mirrored by `Isa` in __init__.py. */
enum isa { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2 };

#endif
