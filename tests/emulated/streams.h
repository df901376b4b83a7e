// Streams, events and memory of the emulated devices. See README.md.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/GPUTrace.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "clocks.h"

// Tells torch's stream sanitizer, where it is on. Not under a lock: it takes the GIL.
#define TRACE(what, ...) \
  if (auto* interpreter = c10::impl::GPUTrace::get_trace()) (*interpreter)->trace_gpu_##what(at::kCUDA __VA_OPT__(,) __VA_ARGS__)

namespace emulated {
using Time = std::chrono::steady_clock;
using Step = std::function<bool()>;  // returns whether it is done; otherwise it is called again

struct Event {
  Clock clock;  // what is done once the event is
  std::atomic<bool> done{false};
  Time::time_point when;
};
using EventPtr = std::shared_ptr<Event>;

long setting(const char* name, long otherwise);  // an environment variable EMULATED_CUDA_…
int device_count();
int current_device();
void set_current_device(int device);
c10::Stream current_stream(int device = -1);
void set_current_stream(c10::Stream);
c10::Stream new_stream(int device);

// Have a step done once the stream gets there. Raises c10::Error if another stream may still use the memory.
void enqueue(c10::Stream, const std::string& op, const std::vector<Range>& memory, Step);
EventPtr record(c10::Stream);
void block(c10::Stream, const EventPtr&);
bool query(const EventPtr&);
void synchronize(const EventPtr&);
void synchronize(c10::Stream);
void synchronize();
bool is_idle(c10::Stream);
// A synchronization that the program did not ask for: counted, and refused in torch's sync debug mode.
void implicit_wait(const std::string& op);
std::map<std::string, long> implicit_waits();
extern int sync_debug_mode;
std::vector<std::string> problems();

// Device memory has two addresses: at its own the host may not touch it, kernels use `visible`.
void* visible(const void*);
std::vector<Range> ranges_of(const at::Tensor&, bool writes);
at::Tensor on_host(const at::Tensor&);  // the same memory, as kernels see it; does not keep it
c10::Allocator& device_memory();
std::pair<size_t, size_t> memory_info(int device);  // free, total
std::vector<std::tuple<int, long, size_t, long, bool>> memory_blocks();  // device, address, size, stream, is in use
bool is_pinned(const void*);
void record_stream(const c10::DataPtr&, c10::Stream);
void empty_cache();
void is_freed(void*, size_t, c10::Stream owner, const std::vector<c10::Stream>& others);  // checks that nobody uses it
// Pinned memory that a device uses is closed to the host: for writing while it is read, wholly while it is written.
void guard_pinned(const Range&, const Moment&);
void release_pinned(const Clock& host);  // what the host has waited for is open again
Clock finished();                        // what the devices have done so far
const at::Generator& generator(int device);
void install_hooks();
}  // namespace emulated
