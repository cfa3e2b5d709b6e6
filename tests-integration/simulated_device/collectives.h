// Collectives of the simulated accelerator: its memory is host memory, so gloo moves it under another name.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace simulated {

using Works = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

inline at::Tensor as_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  // The deleter holds the tensor: a collective may still run when its caller has let go.
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(at::kCPU));
}

inline Tensors as_host(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(as_host(tensor));
  return made;
}

struct Collectives final : c10d::Backend {
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : c10d::Backend(rank, size), gloo(gloo) {}
  const std::string getBackendName() const override { return "simccl"; }

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = as_host(tensors);
    return gloo->broadcast(host, options);
  }
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = as_host(tensors);
    return gloo->allreduce(host, options);
  }
  Works allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> host_out;
    for (const auto& each : out) host_out.push_back(as_host(each));
    auto host_in = as_host(in);
    return gloo->allgather(host_out, host_in, options);
  }
  Works _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto host_out = as_host(out), host_in = as_host(in);
    return gloo->_allgather_base(host_out, host_in, options);
  }
  Works allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto host_out = as_host(out), host_in = as_host(in);
    return gloo->allgather_into_tensor_coalesced(host_out, host_in, options);
  }
  Works scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto host_out = as_host(out);
    std::vector<Tensors> host_in;
    for (const auto& each : in) host_in.push_back(as_host(each));
    return gloo->scatter(host_out, host_in, options);
  }
  Works send(Tensors& tensors, int target, int tag) override {
    auto host = as_host(tensors);
    return gloo->send(host, target, tag);
  }
  Works recv(Tensors& tensors, int source, int tag) override {
    auto host = as_host(tensors);
    return gloo->recv(host, source, tag);
  }
  Works barrier(const c10d::BarrierOptions&) override { return gloo->barrier(c10d::BarrierOptions()); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  c10::intrusive_ptr<c10d::Backend> gloo;
};

}  // namespace simulated
