// Pinned memory that a device uses is closed to the host: for writing while it is read, wholly while it is written.
#pragma once
#include "clocks.h"

namespace emulated {
void guard_pinned(const Range&, const Moment&);
void release_pinned(const Clock& host);  // what the host has waited for is open again
Clock finished();                        // what the devices have done so far
}  // namespace emulated
