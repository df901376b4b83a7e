// Operators: what comes out is told by the meta kernel; the CPU's kernel is enqueued, over the same memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>

#include "streams.h"

namespace emulated {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

Tensor on_host(const Tensor& t) {
  if (!t.defined() || !(t.is_cuda() || (t.is_cpu() && t.has_storage() && is_pinned(t.storage().data())))) return t;
  TORCH_CHECK(!t.numel() || t.storage().data(), "CUDA error: an illegal memory access: the storage was freed");
  return at::from_blob(t.numel() ? visible(t.data_ptr()) : nullptr, t.sizes(), t.strides(), t.options().device(at::kCPU).pinned_memory(false).requires_grad(false));
}
std::vector<Range> ranges_of(const Tensor& t, bool writes) {
  if (!t.defined() || !t.numel() || !t.has_storage() || t.is_meta()) return {};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  auto begin = (uintptr_t)t.data_ptr();
  return {{begin, begin + (last + 1) * t.itemsize(), writes}};
}

namespace {
Tensor as_meta(const Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false).requires_grad(false)) : t;
}
template <class F> IValue each_tensor(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> all;
    for (Tensor t : v.toTensorVector()) all.push_back(f(t));
    return all;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (std::optional<Tensor> t : v.toOptionalTensorList()) all.push_back(t ? std::optional(f(*t)) : t);
    return all;
  }
  return v;
}
std::vector<Tensor> tensors_of(const IValue& v) {
  std::vector<Tensor> all;
  each_tensor(v, [&](const Tensor& t) { all.push_back(t); return t; });
  return all;
}
at::Generator kernel_generator(const at::Generator& given) {
  auto* own = static_cast<at::CPUGeneratorImpl*>((given.defined() ? given : generator(-1)).unsafeGetGeneratorImpl());
  std::lock_guard lock(own->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(own->random64());
}
Stack moved(const Stack& args, at::Device to) {
  Stack all;
  for (auto& v : args)
    if (v.isDevice()) all.push_back(to);
    else if (v.isGenerator()) all.push_back(to.is_meta() ? IValue() : IValue(kernel_generator(v.toGenerator())));
    else all.push_back(each_tensor(v, [&](const Tensor& t) { return to.is_meta() ? as_meta(t) : t.defined() && t.is_cpu() ? t.clone() : on_host(t); }));
  return all;
}
void append(std::vector<Range>& to, const std::vector<Range>& more) { to.insert(to.end(), more.begin(), more.end()); }

// An operator without a view, on its way to the device.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  Stack args, results;
  std::vector<Range> memory;

  bool writes(size_t i) const { auto alias = schema.arguments()[i].alias_info(); return alias && alias->isWrite(); }

  // The device of the tensors, which must be one; scalars and indices may lie on the host.
  at::Device device() {
    std::optional<at::Device> found;
    const bool takes_indices = schema.name().find("index") != std::string::npos;
    for (size_t i = 0; i < args.size(); i++) {
      for (auto& t : tensors_of(args[i])) {
        if (!t.defined()) continue;
        bool may_be_on_host = t.is_cpu() && (t.dim() == 0 || (takes_indices && args[i].isOptionalTensorList()));
        if (!t.is_cuda() && may_be_on_host) continue;
        TORCH_CHECK(t.is_cuda() && (!found || *found == t.device()), "Expected all tensors to be on the same device, but found at least two devices, ",
                    found.value_or(at::Device(at::kCUDA)), " and ", t.device(), "! (", name, ", argument ", schema.arguments()[i].name(), ")");
        found = t.device();
      }
      if (args[i].isDevice() && args[i].toDevice().is_cuda() && args[i].toDevice().has_index()) found = args[i].toDevice();
      if (args[i].isNone() && schema.arguments()[i].name() == "generator") args[i] = generator(found ? found->index() : -1);
    }
    return found.value_or(at::Device(at::kCUDA, current_device()));
  }
  void note_memory() {
    for (size_t i = 0; i < args.size(); i++)
      for (auto& t : tensors_of(args[i])) if (t.defined() && t.is_cuda()) append(memory, ranges_of(t, writes(i)));
  }
  // Shapes by the meta kernel; nothing if there is none, or if they depend on values.
  std::optional<Stack> shapes() {
    for (auto& r : schema.returns())
      if (!r.type()->isSubtypeOf(*c10::TensorType::get()) && !r.type()->isSubtypeOf(*c10::ListType::ofTensors())) return {};
    Stack meta = moved(args, at::kMeta), inputs = meta;
    try { op.callBoxed(&meta); }
    catch (const c10::NotImplementedError&) { return {}; }
    catch (const pybind11::error_already_set&) { return {}; }
    catch (const python_error&) { return {}; }
    for (size_t i = 0; i < args.size(); i++)  // `out`s take their size
      if (writes(i) && args[i].isTensor() && args[i].toTensor().defined() && args[i].toTensor().sizes() != inputs[i].toTensor().sizes())
        args[i].toTensor().resize_(inputs[i].toTensor().sizes());
    return meta;
  }
  // Results that are arguments, and new memory for the others, as `like` says.
  template <class F> void make_results(const Stack& like, F with_new) {
    for (size_t r = 0; r < schema.returns().size(); r++) {
      if (auto alias = schema.returns()[r].alias_info()) {
        TORCH_CHECK(alias->isWrite(), "emulated CUDA lacks the view ", name);
        for (size_t i = 0; i < args.size(); i++) {
          auto other = schema.arguments()[i].alias_info();
          if (other && other->beforeSets() == alias->beforeSets()) { results.push_back(args[i]); break; }
        }
        continue;
      }
      results.push_back(each_tensor(like[r], [](const Tensor& t) {
        return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCUDA)) : t;
      }));
      for (auto& t : tensors_of(results.back())) append(memory, ranges_of(t, true));
      with_new(r);
    }
  }
  void enqueue_kernel(const Stack& meta) {
    Stack host = moved(args, at::kCPU);
    std::vector<std::pair<std::vector<Tensor>, size_t>> fresh;  // where a result of the kernel goes
    make_results(meta, [&](size_t r) {
      std::vector<Tensor> to;
      for (auto& t : tensors_of(results[r])) to.push_back(on_host(t));
      fresh.emplace_back(to, r);
    });
    note_memory();
    enqueue(current_stream(), name, memory, [op = op, name = name, host = std::move(host), fresh = std::move(fresh)]() mutable {
      at::AutoDispatchBelowAutograd below;
      try { op.callBoxed(&host); } catch (const c10::Error& e) {
        TORCH_CHECK(false, "CUDA error in ", name, ": ", e.what_without_backtrace(), " (EMULATED_CUDA_EAGER=1 tells where it was called)");
      }
      for (auto& [to, r] : fresh) {
        auto from = tensors_of(host[r]);
        for (size_t i = 0; i < to.size(); i++) if (to[i].defined() && from[i].defined()) to[i].copy_(from[i]);
      }
      return true;
    });
  }
  void run_now() {  // as a CUDA kernel whose result's shape depends on values
    implicit_wait(name);
    Stack host = moved(args, at::kCPU);
    auto s = current_stream();
    auto put = [&](const Tensor& to, const Tensor& from) {
      if (to.defined()) enqueue(s, name, ranges_of(to, true), [to = on_host(to), from] { to.copy_(from); return true; });
    };
    std::vector<std::pair<Tensor, Tensor>> written;
    for (size_t i = 0; i < args.size(); i++)  // maybe of another size then
      if (writes(i) && args[i].isTensor() && args[i].toTensor().defined())
        written.emplace_back(args[i].toTensor(), host[i].toTensor().clone()), host[i] = written.back().second;
    op.callBoxed(&host);
    for (auto& [to, from] : written) {
      if (to.sizes() != from.sizes()) to.resize_(from.sizes());
      put(to, from);
    }
    make_results(host, [&](size_t r) {
      if (!host[r].isTensor() && !host[r].isTensorList()) return;
      auto to = tensors_of(results[r]), from = tensors_of(host[r]);
      for (size_t i = 0; i < to.size(); i++) put(to[i], from[i]);
    });
  }
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::AutoDispatchBelowAutograd below;
  const size_t n = op.schema().arguments().size();
  Call call{op, op.schema(), toString(op.operator_name()), Stack(stack->end() - n, stack->end()), {}, {}};
  torch::jit::drop(*stack, n);
  c10::DeviceGuard guard(call.device());
  if (auto meta = call.shapes()) call.enqueue_kernel(*meta);
  else call.run_now();
  for (auto& each : call.results) stack->push_back(std::move(each));
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
at::Device of(const Device& given) { return given && given->has_index() ? *given : at::Device(at::kCUDA, current_device()); }
const c10::DispatchKeySet CUDA_KEY(c10::DispatchKey::CUDA);

Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, Device device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(of(device));
  return at::detail::empty_generic(size, &device_memory(), CUDA_KEY, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, Device device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(of(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), CUDA_KEY, c10::dtype_or_default(dtype));
}
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from) || !to.numel()) return to;
  c10::DeviceGuard guard(to.is_cuda() ? to.device() : from.device());
  auto pinned = [](const Tensor& t) { return t.is_cpu() && is_pinned(t.storage().data()); };
  if (to.is_cuda() && from.is_cuda() && to.device() != from.device()) synchronize();
  const bool reads_later = from.is_cuda() || pinned(from);  // pageable memory is read before the call returns
  std::vector<Range> memory = ranges_of(to, true);
  if (reads_later) append(memory, ranges_of(from, false));
  Tensor source = reads_later ? on_host(from) : from.expand(to.sizes()).clone(), keeps = from.is_cpu() ? from.detach() : Tensor();
  Tensor target = on_host(to), kept = to.is_cpu() ? to.detach() : Tensor();
  enqueue(current_stream(), "aten::copy_", memory, [target, source, kept, keeps] { target.copy_(source); return true; });
  if (to.is_cuda() && from.is_cuda()) return to;
  if (!non_blocking) implicit_wait(to.is_cuda() ? "copy_ to the device" : "copy_ to the host");
  else if (to.is_cpu() && !pinned(to)) implicit_wait("copy_ to pageable memory");
  return to;
}
at::Scalar local_scalar(const Tensor& t) {
  c10::DeviceGuard guard(t.device());
  enqueue(current_stream(), "item", ranges_of(t, false), [] { return true; });
  implicit_wait("item");
  return at::native::_local_scalar_dense_cpu(on_host(t));
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  if (self.storage().nbytes()) synchronize();
  return at::native::resize_(self, size, format);
}
void record_on_stream(Tensor& t, c10::Stream s) { record_stream(t.storage().data_ptr(), s); }
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, at::kBool)};
  auto mask = at::empty_like(x, at::kBool).bernoulli_(1 - p);
  return {x * mask * (p == 1 ? 0. : 1 / (1 - p)), mask};
}
// The CPU's kernel wants statistics in the dtype of `x`; as a CUDA build, meta kernels keep float32.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, at::IntArrayRef shape, const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_layer_norm_backward", "");
  Stack stack{grad, x, shape, mean.to(x.dtype()), rstd.to(x.dtype()), weight, bias, c10::List<bool>({mask[0], mask[1], mask[2]})};
  run(op, {}, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}
void resize_storage(at::Storage storage, size_t size) {  // untyped_storage().resize_
  c10::DeviceGuard guard(storage.device());
  auto fresh = device_memory().allocate(size);
  if (size_t both = std::min(size, storage.nbytes())) {
    auto to = (uintptr_t)fresh.get(), from = (uintptr_t)storage.data();
    enqueue(current_stream(), "resize_", {{from, from + both, false}, {to, to + both, true}},
            [to = visible(fresh.get()), from = visible(storage.data()), both] { memcpy(to, from, both); return true; });
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

// A CUDA build does as a CPU build: attention by its math, and norms by operators that the CPU has.
int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }
void composite(const c10::OperatorHandle& op, Stack* stack) { op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack); }
struct Silent : c10::WarningHandler { void process(const c10::Warning&) override {} };

// Operators of `names` run by the CPU's kernels; those below have their own.
void install_operators(const std::vector<std::string>& names) {
  Silent silent;  // a CUDA build has kernels, which are replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);
  static auto* lib = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& m = *lib;
  const std::set<std::string> own{"empty.memory_format", "empty_strided", "copy_", "_local_scalar_dense", "resize_", "record_stream", "native_dropout",
                                  "native_layer_norm_backward", "as_strided", "view", "_reshape_alias", "unfold", "set_", "set_.source_Tensor",
                                  "set_.source_Storage", "set_.source_Storage_storage_offset"};
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_on_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("native_layer_norm_backward", layer_norm_backward);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_", at::native::set_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  for (auto& name : names) if (!own.count(name)) m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  static auto* by_autograd = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  by_autograd->impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&composite>());
  static auto* others = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
}  // namespace
}  // namespace emulated

void add_nccl(pybind11::module& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  install_hooks();
  m.def("install_operators", install_operators);
  m.def("device_count", device_count);
  m.def("get_device", [] { return current_device(); });
  m.def("set_device", set_current_device);
  m.def("exchange_device", [](int d) { int was = current_device(); set_current_device(d); return was; });
  m.def("current_stream", [](int d) { auto s = current_stream(d); return std::tuple(s.id(), (int)s.device_index(), (int)at::kCUDA); });
  m.def("set_stream", [](long id, int d, int) { set_current_device(d), set_current_stream(c10::Stream(c10::Stream::UNSAFE, {at::kCUDA, (c10::DeviceIndex)d}, id)); },
        pybind11::arg("stream_id"), pybind11::arg("device_index"), pybind11::arg("device_type"));
  m.def("synchronize", [] { synchronize(); });
  m.def("sleep", [](long cycles) {
    auto until = std::make_shared<std::optional<Time::time_point>>();
    enqueue(current_stream(), "sleep", {}, [until, cycles] {
      if (!*until) *until = Time::now() + std::chrono::nanoseconds(long(cycles / 1.7));
      return Time::now() >= **until;
    });
  });
  m.def("resize_storage", [](pybind11::object s, size_t n) { resize_storage(torch::createStorage(s.ptr()), n); });
  m.def("elapsed_time", [](long a, long b) { return c10::impl::getDeviceGuardImpl(at::kCUDA)->elapsedTime((void*)a, (void*)b, 0); });
  m.def("generator", generator);
  m.def("memory_info", memory_info);
  m.def("memory_blocks", memory_blocks);
  m.def("empty_cache", empty_cache);
  m.def("host_waits", implicit_waits);
  m.def("problems", problems);
  m.def("set_sync_debug", [](int mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug", [] { return sync_debug_mode; });
  add_nccl(m);
}
