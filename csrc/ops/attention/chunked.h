// Chunked attention (Llama 4): positions [c C, (c + 1) C) of a sequence are its chunk c, and a query sees the keys of
// its own chunk only, up to itself. So each chunk is a sequence of its own, whose first key is the chunk's first.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"

namespace kt {

// Cuts the queries of each sequence at the ends of chunks of `chunk` keys, into one part for each chunk that has some.
// False, and `parts` stays empty: no sequence has more keys than one chunk, so that the parts would be the sequences.
bool cut_at_chunks(const std::vector<KvSequence>& sequences, int64_t chunk, std::vector<KvSequence>* parts);

}  // namespace kt
