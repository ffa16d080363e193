// A stand-in accelerator for tests on machines without one: a device type of its own, with two devices.
//
// Its memory is the host's and its kernels are those of the CPU, so its numbers are the CPU's, bit for bit. All else is as
// on a GPU: tensors of different devices can't be mixed; streams, events and a caching allocator keep the rules of
// CUDA's; memory can run out. Work is done at once, in the caller's thread, and told to a listener (`tell`), with the
// memory that it reads and writes. So a test can find what would have been a race, a copy, or a wait.
#include <ATen/EmptyTensor.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <sstream>

#include "graphs.h"

namespace {
bool here(const Tensor& t) { return t.defined() && t.device().type() == KIND; }

Tensor host(const Tensor& t) {  // the same memory as a tensor of the CPU
  if (!here(t)) return t;
  auto storage = t.storage();
  Storage alias(Storage::use_byte_size_t(), storage.nbytes(),
                DataPtr(storage.mutable_data(), nullptr, [](void*) {}, Device(kCPU)));
  auto made = at::empty({0}, t.options().device(kCPU)).set_(alias, t.storage_offset(), t.sizes(), t.strides());
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}
std::optional<Tensor> host(const std::optional<Tensor>& t) { return t ? std::optional<Tensor>(host(*t)) : t; }

Tensor like_host(const Tensor& t, Device device) {  // a copy of a CPU tensor, strides and all
  On on(device);
  Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), &memory(), DispatchKeySet(KEY),
                                                t.scalar_type());
  host(made).copy_(t);
  return made;
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  On on(device.value_or(Device(KIND, current)));
  return at::detail::empty_generic(size, &memory(), DispatchKeySet(KEY),
                                   dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  On on(device.value_or(Device(KIND, current)));
  return at::detail::empty_strided_generic(size, strides, &memory(), DispatchKeySet(KEY),
                                           dtype_or_default(dtype));
}

// From the host it waits unless `non_blocking` and pinned, to the host unless `non_blocking`. Between devices both
// streams wait for each other, as with CUDA.
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const auto from_stream = here(self) ? stream_of(self.device()) : 0, to_stream = here(to) ? stream_of(to.device()) : 0;
  const bool from_pinned = !here(self) && pinned().has(self.storage().data());
  std::ostringstream text;
  text << self.sizes() << (non_blocking && (here(self) || from_pinned) ? " async" : " waits");
  const char* kind = !here(to) ? "d2h" : !here(self) ? "h2d" : self.device() == to.device() ? "op" : "p2p";
  if (strcmp(kind, "op")) refuse_within_capture("a copy between devices");
  auto copy = [from = host(self), into = host(to)] { into.copy_(from); };
  copy();
  record(copy, {place(self)}, {place(to)});
  if (!strcmp(kind, "p2p"))
    tell(kind, text.str(), from_stream, {to_stream, place(self)}, {place(to)});
  else
    tell(kind, strcmp(kind, "op") ? text.str() : "aten::copy_", here(to) ? to_stream : from_stream,
         here(self) || from_pinned ? Places{place(self)} : Places{}, here(to) ? Places{place(to)} : Places{});
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}
Scalar local_scalar_dense(const Tensor& self) {
  refuse_within_capture("item");
  tell("item", "", stream_of(self.device()), {place(self)});
  return host(self).item();
}
const Tensor& resize(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  On on(self.device());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
  if (self.storage().nbytes() < bytes) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}
void record_stream(Tensor& self, Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

// Convolutions have an entry of their own for devices that torch does not know.
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   SymInt groups) {
  TORCH_CHECK(x.device() == w.device(), "convolution: Expected all tensors to be on the same device");
  auto run = [x = host(x), w = host(w), b = host(b), stride = stride.vec(), padding = padding.vec(),
              dilation = dilation.vec(), transposed, output_padding = output_padding.vec(), groups] {
    return at::convolution_symint(x, w, b, stride, padding, dilation, transposed, output_padding, groups);
  };
  auto made = like_host(run(), x.device());
  Places read{place(x), place(w)};
  if (b && b->defined()) read.push_back(place(*b));
  record([run, made] { host(made).copy_(run()); }, read, {place(made)});
  tell("op", "aten::convolution", stream_of(x.device()), read, {place(made)});
  return made;
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& w, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups, std::array<bool, 3> mask) {
  std::vector<SymInt> bias{w.sym_size(transposed ? 1 : 0) * (transposed ? groups : SymInt(1))};
  auto run = [grad = host(grad), x = host(x), w = host(w), bias, stride = stride.vec(), padding = padding.vec(),
              dilation = dilation.vec(), transposed, output_padding = output_padding.vec(), groups, mask] {
    return at::convolution_backward_symint(grad, x, w, SymIntArrayRef(bias), stride, padding, dilation, transposed,
                                           output_padding, groups, mask);
  };
  auto [gx, gw, gb] = run();
  Places write;
  auto back = [&](const Tensor& t) {
    auto made = t.defined() ? like_host(t, x.device()) : t;
    if (made.defined()) write.push_back(place(made));
    return made;
  };
  auto made = std::make_tuple(back(gx), back(gw), back(gb));
  record(
      [run, made] {
        auto fresh = run();
        auto copy = [](const Tensor& to, const Tensor& from) { if (to.defined()) host(to).copy_(from); };
        copy(std::get<0>(made), std::get<0>(fresh));
        copy(std::get<1>(made), std::get<1>(fresh));
        copy(std::get<2>(made), std::get<2>(fresh));
      },
      {place(grad), place(x), place(w)}, write);
  tell("op", "aten::convolution_backward", stream_of(x.device()), {place(grad), place(x), place(w)}, write);
  return made;
}

// Operations whose result has a size that depends on the numbers: the host waits for it.
bool reads_sizes(const std::string& name) {
  for (auto known : {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::unique",
                     "aten::bincount", "aten::repeat_interleave.Tensor"})
    if (name.rfind(known, 0) == 0) return name.rfind("aten::nonzero_static", 0) != 0;
  return false;
}
// Indexing moves indices of the host to the device: allowed, as with CUDA, but a copy.
bool takes_host_indices(const std::string& name) {
  for (auto known : {"aten::index.Tensor", "aten::index_put", "aten::_index_put", "aten::_unsafe_index"})
    if (name.rfind(known, 0) == 0) return true;
  return false;
}

// Any other operation: the CPU's kernel on the same memory.
struct Call {
  const OperatorHandle& op;
  torch::jit::Stack* stack;
  std::string name = toString(op.schema().operator_name());
  std::vector<std::pair<Tensor, Tensor>> known;  // (of the host, of the device)
  Places read, write;
  std::optional<Device> device;
  std::vector<Tensor> of_host;
  std::vector<std::pair<size_t, Tensor>> results;  // what to copy a result to, by its number
  size_t returned = 0;

  Tensor argument(const Tensor& t, bool written, bool out) {
    if (!t.defined()) return t;
    if (!here(t)) {
      if (t.dim() > 0) of_host.push_back(t);
      return t;
    }
    TORCH_CHECK(device.value_or(t.device()) == t.device(), name,
                ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                t.device());
    device = t.device();
    if (t.numel()) (written ? write : read).push_back(place(t));
    known.emplace_back(out ? at::empty({0}, t.options().device(kCPU)) : host(t), t);
    return known.back().first;
  }
  void take_arguments() {
    const auto& arguments = op.schema().arguments();
    const size_t begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      IValue& value = (*stack)[begin + i];
      const auto* alias = arguments[i].alias_info();
      const bool written = alias && alias->isWrite(), out = written && arguments[i].kwarg_only();
      if (value.isTensor()) {
        value = argument(value.toTensor(), written, out);
      } else if (value.isTensorList()) {
        std::vector<Tensor> tensors;
        for (const Tensor& t : value.toTensorVector()) tensors.push_back(argument(t, written, out));
        value = IValue(List<Tensor>(tensors));
      } else if (value.isOptionalTensorList()) {
        List<std::optional<Tensor>> tensors;
        for (std::optional<Tensor> t : value.toOptionalTensorList())
          tensors.push_back(t && t->defined() ? std::optional<Tensor>(argument(*t, written, out)) : t);
        value = IValue(tensors);
      }
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      IValue& value = (*stack)[begin + i];
      if (value.isDevice() && value.toDevice().type() == KIND) {
        if (!device) device = Device(KIND, Guard::index(value.toDevice()));
        value = IValue(Device(kCPU));
      }
    }
    if (!device) device = Device(KIND, current);
    for (size_t i = 0; i < arguments.size(); ++i) {  // random numbers come from the device's own generator
      auto optional = arguments[i].type()->cast<OptionalType>();
      if (optional && optional->getElementType()->kind() == TypeKind::GeneratorType && (*stack)[begin + i].isNone())
        (*stack)[begin + i] = IValue(generator(device->index()));
    }
  }
  void check_devices() {
    if (of_host.empty()) return;
    TORCH_CHECK(takes_host_indices(name), name, ": Expected all tensors to be on the same device, but found at least ",
                "two devices, ", *device, " and cpu");
    for (const Tensor& t : of_host) {
      std::ostringstream text;
      text << t.sizes() << " waits";
      tell("h2d", text.str(), stream_of(*device));
    }
  }
  Tensor result(const Tensor& t) {
    if (!t.defined() || t.device().type() != DeviceType::CPU) return t;
    for (auto& [own, there] : known) {
      if (own.unsafeGetTensorImpl() != t.unsafeGetTensorImpl()) continue;
      if (own.sizes() != there.sizes()) there.resize_(own.sizes());
      if (own.data_ptr() != there.data_ptr()) {
        host(there).copy_(own);
        results.emplace_back(returned, host(there));
      }
      return there;
    }
    auto made = like_host(t, *device);
    results.emplace_back(returned, made);
    if (made.numel()) write.push_back(place(made));
    return made;
  }
  void run() {
    for (const auto& returned : op.schema().returns())
      TORCH_CHECK(!returned.alias_info() || returned.alias_info()->isWrite(), name, " makes a view, and is not here yet");
    take_arguments();
    check_devices();
    if (reads_sizes(name)) {
      refuse_within_capture(name);
      tell("item", name, stream_of(*device), read);
    }
    torch::jit::Stack given;
    if (recording) given = copied_arguments();
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    const size_t begin = stack->size() - op.schema().returns().size();
    for (size_t i = begin; i < stack->size(); ++i) {
      IValue& value = (*stack)[i];
      if (value.isTensor()) {
        value = result(value.toTensor());
        ++returned;
      } else if (value.isTensorList()) {
        std::vector<Tensor> tensors;
        for (const Tensor& t : value.toTensorVector()) {
          tensors.push_back(result(t));
          ++returned;
        }
        value = IValue(List<Tensor>(tensors));
      }
    }
    if (recording) record([op = op, given, results = results] { replay(op, given, results); }, read, write);
    tell("op", name, stream_of(*device), read, write);
  }
  torch::jit::Stack copied_arguments() {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto optional = arguments[i].type()->cast<OptionalType>();
      if (optional && optional->getElementType()->kind() == TypeKind::GeneratorType) refuse_within_capture("a draw");
    }
    return {stack->end() - arguments.size(), stack->end()};
  }
  static void replay(const OperatorHandle& op, torch::jit::Stack stack,
                     const std::vector<std::pair<size_t, Tensor>>& results) {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    std::vector<Tensor> fresh;
    for (const IValue& value : stack) {
      if (value.isTensor()) fresh.push_back(value.toTensor());
      if (value.isTensorList())
        for (const Tensor& t : value.toTensorVector()) fresh.push_back(t);
    }
    for (auto& [number, to] : results) host(to).copy_(fresh.at(number));
  }
};
void fallback(const OperatorHandle& op, torch::jit::Stack* stack) { Call{op, stack}.run(); }

// One launch for all, as with CUDA; between devices, a copy for each.
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  bool together = true;
  for (size_t i = 0; i < to.size(); ++i)
    together &= here(to[i]) && to[i].device() == from[i].device() && to[i].device() == to[0].device();
  if (!together) return at::native::foreach_tensor_copy_list_kernel_slow_(to, from, non_blocking);
  Places read, write;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  for (size_t i = 0; i < to.size(); ++i) {
    pairs.emplace_back(host(to[i]), host(from[i]));
    read.push_back(place(from[i]));
    write.push_back(place(to[i]));
  }
  auto copy = [pairs] { for (auto& [into, own] : pairs) into.copy_(own); };
  copy();
  record(copy, read, write);
  if (!to.empty()) tell("op", "aten::_foreach_copy_", stream_of(to[0].device()), read, write);
}

Tensor as_strided(const Tensor& t, SymIntArrayRef size, SymIntArrayRef strides, std::optional<SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& t, SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& t, SymIntArrayRef size, SymIntArrayRef strides) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
}
Tensor& set_storage(Tensor& t, Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(t, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(strides));
}
Tensor& set_whole_storage(Tensor& t, Storage storage) {
  const int64_t count = storage.nbytes() / t.itemsize();
  return at::native::set_storage_cpu_(t, storage, 0, {count}, {1});
}
Tensor& set_tensor(Tensor& t, const Tensor& other) {
  return at::native::set_storage_cpu_(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_foreach_copy_", foreach_copy);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_DTYPE)
  AT_FORALL_PROMOTE(PROMOTED)
}
}  // namespace at::autocast

extern "C" {
void standin_register() {
  static Guard guard;
  impl::registerDeviceGuard(KIND, &guard);
  SetAllocator(KIND, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
void standin_listen(Listener told) { listener = told; }
void standin_seed(int device, uint64_t seed) {
  std::lock_guard<std::mutex> lock(generator(device).mutex());
  generator(device).set_current_seed(seed);
}
// Copies the generator's state to or from `bytes`, of which there are `standin_generator_bytes`.
int64_t standin_generator_bytes() { return Tensor(generator(0).get_state()).nbytes(); }
void standin_get_state(int device, void* bytes) {
  auto state = Tensor(generator(device).get_state());
  memcpy(bytes, state.data_ptr(), state.nbytes());
}
void standin_set_state(int device, void* bytes) {
  auto state = at::empty({standin_generator_bytes()}, at::kByte);
  memcpy(state.data_ptr(), bytes, state.nbytes());
  generator(device).set_state(state);
}
// At most so many bytes on a device, and in one block; 0 for as many as there are.
void standin_limit(int device, uint64_t total, uint64_t largest) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().limit[device] = total ? total : MEMORY;
  memory().largest = largest ? largest : MEMORY;
}
}
