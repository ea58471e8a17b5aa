// Software model of the tile instructions of Intel AMX (AMX-TILE, AMX-INT8, AMX-BF16), for machines without them.
//
// It follows the operation sections of Intel's instruction reference, bit for bit but for the payload of NaNs:
//   - one state per thread; palette 1: 8 tiles of at most 16 rows of 64 bytes;
//   - bad configurations (#GP) and tile operands (#UD) call `fault_handler()`, by default a message and abort;
//   - TDPBF16PS: per row two sets of float32 sums (even and odd members of the bf16 pairs) start at +0, one fused
//     multiply-add per pair in ascending order, then even + odd, then destination + that sum. Every step rounds to
//     nearest even; denormals count as zero and are flushed to zero (tininess is judged after rounding); MXCSR is
//     neither read nor changed;
//   - TDPBSUD, TDPBSSD: 32-bit wrap-around sums, no saturation.
// On a processor with AMX the tests compare it with the instructions (amx_test.cpp); an Intel Xeon gave the same bits.
// Its functions are in tile_model.cpp: compiled once, with the library's optimization, where the kernels that call them
// are compiled with little (CMakeLists.txt).
#pragma once

#include <cstddef>

namespace kt_test::tile_model {

enum class Fault { kGeneralProtection, kInvalidOpcode };
using FaultHandler = void (*)(Fault, const char* what);

void abort_on_fault(Fault fault, const char* what);
// An instruction at fault has no effect, should the handler return.
FaultHandler& fault_handler();

// 64 bytes: palette, first row, 14 reserved, 16 x row bytes (uint16, the last 8 reserved), 16 x rows (the same).
void load_config(const void* memory);
void release();

void load(int tile, const void* base, ptrdiff_t stride);
void store(int tile, void* base, ptrdiff_t stride);
void zero(int tile);

// c[m][n] += a[m][k] * b[k][n], a and b in groups of 32 bits.
void dot_s8u8(int c, int a, int b);
void dot_s8s8(int c, int a, int b);
void dot_bf16(int c, int a, int b);

// Whether TDPBF16PS is computed with the processor's own fused multiply-add: where it has one, unless a test changes
// it.
bool& use_fused();

}  // namespace kt_test::tile_model
