#include <cstring>
#include <stdexcept>
#include <string>

#include "ops.hpp"

namespace sluicegate {

namespace {

bool has_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

}  // namespace

const Ops& choose_ops(const char* isa) {
    const bool any = isa == nullptr || *isa == '\0';
#if defined(__x86_64__)
    if (any ? has_avx512() : std::strcmp(isa, "avx512") == 0) {
        if (!has_avx512()) throw std::invalid_argument("this processor has no AVX-512 with VNNI");
        return avx512_ops();
    }
    if (any ? has_avx2() : std::strcmp(isa, "avx2") == 0) {
        if (!has_avx2()) throw std::invalid_argument("this processor has no AVX2 with FMA and F16C");
        return avx2_ops();
    }
#endif
    if (any || std::strcmp(isa, "portable") == 0) return portable_ops();
    throw std::invalid_argument("unknown instruction set '" + std::string(isa) + "': use portable, avx2 or avx512");
}

}  // namespace sluicegate
