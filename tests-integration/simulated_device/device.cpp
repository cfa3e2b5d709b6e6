// A simulated accelerator for tests: devices of a PrivateUse1 backend whose memory is host memory.
//
// What it makes real: a limit of bytes per device with torch.OutOfMemoryError, peak counters, errors when an operation
// mixes devices, and counters of the bytes copied in and out. Every operation computes on the CPU. Streams exist, but
// all work is done when it is issued, so no race can show here; the schedule's own tests cover order.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
constexpr int kMaxDevices = 16;
constexpr auto kSimulated = c10::DeviceType::PrivateUse1;

// ---- memory ----------------------------------------------------------------------------------------------------

struct Memory {
  struct Allocation {
    int device;
    int64_t bytes;
  };

  void* take(int device, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    const auto wanted = static_cast<int64_t>(bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, used[device] + wanted <= limit,
        "simulated device ", device, " is out of memory: ", bytes, " bytes wanted, ", limit - used[device], " of ",
        limit, " free");
    void* address = std::malloc(bytes);
    allocations[address] = {device, wanted};
    used[device] += wanted;
    peak[device] = std::max(peak[device], used[device]);
    return address;
  }

  void give(void* address) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = allocations.find(address);
    if (found == allocations.end()) return;
    used[found->second.device] -= found->second.bytes;
    allocations.erase(found);
    std::free(address);
  }

  int owner(void* address) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = allocations.find(address);
    return found == allocations.end() ? 0 : found->second.device;
  }

  std::mutex lock;
  std::unordered_map<void*, Allocation> allocations;
  int64_t limit = int64_t(1) << 30;
  int64_t used[kMaxDevices] = {};
  int64_t peak[kMaxDevices] = {};
};

Memory& memory() {
  static auto* the_memory = new Memory();  // never destroyed: tensors may outlive static destruction
  return *the_memory;
}

int device_count = 2;
thread_local int current_device = 0;
thread_local int64_t current_stream[kMaxDevices] = {};
std::atomic<int64_t> next_stream{1}, bytes_in{0}, bytes_out{0};

void release(void* address) {
  if (address != nullptr) memory().give(address);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    void* address = bytes == 0 ? nullptr : memory().take(device, bytes);
    return {address, address, &release, c10::Device(kSimulated, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kSimulated, &device_allocator);

// Memory of the host that torch asks for as pinned; it only has to be told from other memory.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(lock());
    pinned().insert(address);
    return {address, address, &give, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  static bool holds(const void* address) {
    std::lock_guard<std::mutex> guard(lock());
    return pinned().count(const_cast<void*>(address)) > 0;
  }

 private:
  static void give(void* address) {
    {
      std::lock_guard<std::mutex> guard(lock());
      pinned().erase(address);
    }
    std::free(address);
  }
  static std::mutex& lock() {
    static auto* the_lock = new std::mutex();
    return *the_lock;
  }
  static std::unordered_set<void*>& pinned() {
    static auto* addresses = new std::unordered_set<void*>();  // never destroyed, as the devices' memory
    return *addresses;
  }
};

PinnedAllocator pinned_allocator;

// ---- devices, streams, events ----------------------------------------------------------------------------------

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current_device);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSimulated; }
  c10::Device getDevice() const override { return {kSimulated, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count, "there is no simulated device ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count); }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSimulated, index), current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSimulated, index_of(device)), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new int(0);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return PinnedAllocator::holds(address); }
  at::Device getDeviceFromPtr(void* address) const override {
    return {kSimulated, static_cast<c10::DeviceIndex>(memory().owner(address))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto grown = device_allocator.allocate(bytes);
    std::memcpy(grown.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

// ---- operations that a backend has to have ---------------------------------------------------------------------

Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  at::NoGradGuard no_grad;
  if (source.is_cpu() && !target.is_cpu()) bytes_in += static_cast<int64_t>(target.nbytes());
  if (!source.is_cpu() && target.is_cpu()) bytes_out += static_cast<int64_t>(source.nbytes());
  if (source.numel() > 0) on_host(target).copy_(on_host(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor alias(const Tensor& base, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto view = at::detail::make_tensor<at::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return view;
}

Tensor as_strided(
    const Tensor& base, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return alias(
      base, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->expect_int() : base.storage_offset());
}

Tensor view(const Tensor& base, c10::SymIntArrayRef wanted) {
  const auto size = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(wanted), base.numel());
  const auto stride = at::detail::computeStride(base.sizes(), base.strides(), size);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with the tensor's size and stride");
  return alias(base, size, *stride, base.storage_offset());
}

Tensor reshape_alias(const Tensor& base, c10::SymIntArrayRef size, c10::SymIntArrayRef) { return view(base, size); }

const Tensor& resize(const Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (tensor.numel() + tensor.storage_offset()) * tensor.itemsize();
  if (needed > tensor.storage().nbytes()) Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

Tensor& set_storage(
    Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, c10::SymIntArrayRef({count}), c10::SymIntArrayRef({1}));
}

Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_storage(tensor, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const bool has_bias = bias.has_value() && bias->defined();
  TORCH_CHECK(
      weight.device() == input.device() && (!has_bias || bias->device() == input.device()),
      "Expected all tensors to be on the same device, but found at least two: ", input.device(), " and ",
      weight.device(), " (aten::convolution)");
  c10::DeviceGuard guard(input.device());
  const auto host_bias = has_bias ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return at::convolution_symint(
             on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  c10::DeviceGuard guard(input.device());
  const c10::SymInt outputs = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto [to_input, to_weight, to_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), at::OptionalSymIntArrayRef({outputs}), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  const auto back = [&input](const Tensor& found) { return found.defined() ? found.to(input.device()) : found; };
  return {back(to_input), back(to_weight), back(to_bias)};
}

at::Scalar item(const Tensor& tensor) { return on_host(tensor).clone().item(); }
bool shallow_copy_is_compatible(const Tensor&, const Tensor&) { return true; }
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_local_scalar_dense", item);
  library.impl("_has_compatible_shallow_copy_type", shallow_copy_is_compatible);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", convolution);  // its default raises, so the fallback is not asked
  library.impl("convolution_backward_overrideable", convolution_backward);
}

// ---- everything else: on the CPU, after a look at the devices ---------------------------------------------------

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  int device = -1;
  bool host = false;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().dim() == 0) continue;
    const Tensor& tensor = value.toTensor();
    if (tensor.is_cpu()) host = true;
    if (!tensor.is_privateuseone()) continue;
    const int found = static_cast<int>(tensor.get_device());
    TORCH_CHECK(
        device < 0 || device == found, "Expected all tensors to be on the same device, but found at least two: ",
        device, " and ", found, " (", op.schema().name(), ")");
    device = found;
  }
  const auto& name = op.schema().name();
  const bool may_index_from_host = name == "aten::index" || name == "aten::_index_put_impl_";
  TORCH_CHECK(
      !host || device < 0 || may_index_from_host,
      "Expected all tensors to be on the same device, but found at least two: ", device, " and cpu (", name, ")");
  c10::OptionalDeviceGuard guard;
  if (device >= 0) guard.reset_device({kSimulated, static_cast<c10::DeviceIndex>(device)});
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("set_up", [](int count, int64_t limit) {
    TORCH_CHECK(count <= kMaxDevices, "at most ", kMaxDevices, " simulated devices");
    device_count = count;
    memory().limit = limit;
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  });
  module.def("set_limit", [](int64_t limit) { memory().limit = limit; });
  module.def("limit", [] { return memory().limit; });
  module.def("count", [] { return device_count; });
  module.def("current", [] { return current_device; });
  module.def("select", [](int device) { Guard().setDevice({kSimulated, static_cast<c10::DeviceIndex>(device)}); });
  module.def("used", [](int device) { return memory().used[device]; });
  module.def("peak", [](int device) { return memory().peak[device]; });
  module.def("reset_peak", [](int device) { memory().peak[device] = memory().used[device]; });
  module.def("bytes_in", [] { return bytes_in.load(); });
  module.def("bytes_out", [] { return bytes_out.load(); });
  module.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(
        c10::make_intrusive<simulated::Collectives>(std::move(gloo), rank, size));
  });
}
