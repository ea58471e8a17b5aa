#include "kernels/format.h"

namespace kt {

std::string format_name(const Format& format) {
  static const char* const kNames[] = {"bf16", "fp8_e4m3", "int8", "int4", "int5", "int6", "mxfp4", "nvfp4", "iq4"};
  std::string name = kNames[static_cast<int>(format.encoding)];
  if (format.encoding == Encoding::kFp8 && format.scales == Scales::kExponent) name = "mxfp8";
  if (format.scales == Scales::kByte) name += "k";
  if (format.group) name += "_g" + std::to_string(format.group);
  return format.zero_points ? name + "_zp" : name;
}

}  // namespace kt
