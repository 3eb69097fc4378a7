// SPDX-License-Identifier: Apache-2.0
// The server on a real network: which workers are let in, and what the others are told; how many bytes it takes; and
// that clients that are hostile, or never say anything, or never read, harm no worker.
#include "server/server_rpc_fixture.h"

namespace gradwire::server {
namespace {

std::unique_ptr<ToyWorker> make_toy(const RpcServer& net, const Security& security = {}, uint64_t seed = 1,
                                    const Signature& signature = tiny_signature()) {
  return std::make_unique<ToyWorker>(net.dialer(security), signature, seed);
}

void expect_work(RpcServer& net, const Security& security = {}, uint64_t seed = 1) {
  const auto toy = make_toy(net, security, seed);
  const uint64_t from = toy->join();
  while (toy->step < from + 3) toy->work();
  EXPECT_TRUE(toy->client.leave(kPatience));
  EXPECT_EQ(toy->client.counts().reconnects, 0u);
}

// What a worker is told that is not let in. It is told at once: its patience is longer than a test.
std::pair<ErrorKind, std::string> refusal(const RpcServer& net, const Security& security,
                                          const Signature& signature = tiny_signature(),
                                          const std::string& words = "") {
  ToyTensors weights(signature);
  Client client(
      {.signature = signature, .dial = net.dialer(security), .name = "refused", .id = {}, .patience_s = 3600});
  try {
    client.join(weights.pointers);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return {error.kind(), error.field()};
  }
  return {ErrorKind::unsupported, "no worker was refused"};
}

using RefusalReason = std::pair<ErrorKind, std::string>;

std::string token_file(const std::string& name, const std::string& text) {
  const std::string path = scratch_file(name);
  std::ofstream(path) << text;
  return path;
}

// Who is let in ------------------------------------------------------------------------------------------------------

TEST(ServerRpc, WorkersTrainOverPlainTextTlsAndMutualTls) {
  RpcServer plain;
  expect_work(plain);
  for (bool mutual : {false, true}) {
    ListenOptions options;
    options.security = Certificates::get().server(mutual);
    RpcServer net(small_hub(), options);
    expect_work(net, Certificates::get().worker(mutual));
    const nlohmann::json status = fetch_status({net.address(), Certificates::get().worker(mutual)}, kPatience);
    EXPECT_EQ(status["step"], 3) << mutual;
  }
}

TEST(ServerRpc, AServerWithACertificateOfAnotherAuthorityIsNotTrusted) {
  ListenOptions options;
  options.security = Certificates::get().server(false);
  RpcServer net(small_hub(), options);
  EXPECT_EQ(refusal(net, Certificates::get().worker(false, "other"), tiny_signature(), "certificate"),
            RefusalReason(ErrorKind::mismatch, "tls-ca"));
  expect_work(net, Certificates::get().worker(false));
}

TEST(ServerRpc, AWorkerWithoutACertificateOrWithAnothersIsNotLetIn) {
  ListenOptions options;
  options.security = Certificates::get().server(true);
  RpcServer net(small_hub(), options);
  EXPECT_EQ(refusal(net, Certificates::get().worker(false), tiny_signature(), "wants a certificate of this worker"),
            RefusalReason(ErrorKind::mismatch, "tls-cert"));
  Security untrusted = Certificates::get().worker(true, "other");
  untrusted.authority = Certificates::get().file("good-ca.pem");
  EXPECT_EQ(refusal(net, untrusted, tiny_signature(), "does not accept the certificate of this worker"),
            RefusalReason(ErrorKind::mismatch, "tls-cert"));
  EXPECT_EQ(net.hub.status()["workers"]["list"].size(), 0u);
  expect_work(net, Certificates::get().worker(true));
}

TEST(ServerRpc, PlainTextToATlsServerAndTlsToAPlainServerEndWithWords) {
  ListenOptions options;
  options.security = Certificates::get().server(false);
  RpcServer tls(small_hub(), options), plain;
  EXPECT_EQ(refusal(tls, {}, tiny_signature(), "speaks TLS"), RefusalReason(ErrorKind::mismatch, "tls-ca"));
  EXPECT_EQ(refusal(plain, Certificates::get().worker(false), tiny_signature(), "TLS"),
            RefusalReason(ErrorKind::mismatch, "tls-ca"));
  expect_work(tls, Certificates::get().worker(false));
  expect_work(plain);
}

TEST(ServerRpc, AWrongOrMissingTokenIsRefusedAtOnceAndCounted) {
  ListenOptions options;
  options.security.token_file = token_file("token", "correct-horse\nand more\n");
  RpcServer net(small_hub(), options);
  Security wrong, longer;
  wrong.token_file = token_file("wrong", "incorrect-horse\n");
  longer.token_file = token_file("longer", "correct-horse-and-more\n");
  const RefusalReason expected{ErrorKind::mismatch, "token"};
  EXPECT_EQ(refusal(net, {}, tiny_signature(), "token"), expected);
  EXPECT_EQ(refusal(net, wrong, tiny_signature(), "token"), expected);
  EXPECT_EQ(refusal(net, longer, tiny_signature(), "token"), expected);
  EXPECT_EQ(net.refused("token"), 3u);
  EXPECT_THROW(fetch_status({net.address(), wrong}, kPatience), Error);
  expect_work(net, options.security);
  EXPECT_EQ(fetch_status({net.address(), options.security}, kPatience)["refused"]["token"], 4);
}

TEST(ServerRpc, AnotherModelIsRefusedWithTheFirstDifference) {
  RpcServer net;
  const auto toy = make_toy(net);
  toy->join();
  Signature other = tiny_signature();
  other.parameters[1].shape = {41};
  EXPECT_EQ(refusal(net, {}, other, "bias"), RefusalReason(ErrorKind::mismatch, "signature"));
  EXPECT_EQ(net.refused("signature"), 1u);
}

template <class Work>
std::string field_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.field();
  }
  return "nothing was thrown";
}

TEST(ServerRpc, PlainTextBeyondThisMachineMustBeAskedFor) {
  ServerHub hub(small_hub());
  const auto listen = [&](const std::string& address, const Security& security) {
    return field_of([&] {
      ListenOptions options;
      options.address = address;
      options.security = security;
      const RpcListener listener(hub, options);
      EXPECT_GT(listener.port(), 0);
    });
  };
  const auto dial = [](const std::string& address, const Security& security) {
    return field_of([&] { make_dialer({address, security}); });
  };
  Security asked;
  asked.insecure = true;
  EXPECT_EQ(listen("0.0.0.0:0", {}), "insecure");
  EXPECT_EQ(listen("0.0.0.0:0", asked), "nothing was thrown");
  EXPECT_EQ(listen("0.0.0.0:0", Certificates::get().server(true)), "nothing was thrown");
  for (const char* address :
       {"192.0.2.1:7070", "example.org:7070", "127.0.0.1.example.org:7070", "[2001:db8::1]:7070"}) {
    EXPECT_EQ(dial(address, {}), "insecure") << address;
    EXPECT_EQ(dial(address, asked), "nothing was thrown") << address;
  }
  for (const char* address : {"localhost:7070", "[::1]:7070", "127.9.9.9:1"})
    EXPECT_EQ(dial(address, {}), "nothing was thrown") << address;
  for (const char* address :
       {"", "localhost", ":7070", "localhost:", "localhost:x", "localhost:65536", "localhost:-1"}) {
    EXPECT_EQ(dial(address, {}), "server") << address;
    EXPECT_EQ(listen(address, {}), "listen") << address;
  }
}

TEST(ServerRpc, SecretsThatCannotBeUsedAreNamed) {
  const Certificates& made = Certificates::get();
  RpcServer net;
  const auto with = [&](const auto& change) {
    Security security = made.worker(true);
    change(security);
    return field_of([&] { make_dialer({net.address(), security}); });
  };
  EXPECT_EQ(with([](Security& s) { s.certificate += ".none"; }), "tls-cert");
  EXPECT_EQ(with([](Security& s) { s.authority += ".none"; }), "tls-ca");
  EXPECT_EQ(with([](Security& s) { s.authority = std::filesystem::temp_directory_path(); }), "tls-ca");
  EXPECT_EQ(with([&](Security& s) { s.key = token_file("pem", "no key at all\n"); }), "tls-key");
  EXPECT_EQ(with([](Security& s) { s.key.clear(); }), "tls-key");
  EXPECT_EQ(with([](Security& s) { s.certificate.clear(); }), "tls-cert");
  EXPECT_EQ(with([](Security& s) { s.token_file = token_file("short", "short\n"); }), "token-file");
  EXPECT_EQ(with([](Security& s) { s.token_file = token_file("blank", "eight or more\n"); }), "token-file");
  ServerHub hub(small_hub());
  ListenOptions options{.address = "127.0.0.1:0", .security = made.server(false)};
  options.security.key = made.file("good-worker.key");  // another certificate's
  EXPECT_EQ(field_of([&] { const RpcListener listener(hub, options); }), "listen");
  options.security = {"", "", made.file("good-ca.pem"), "", false};
  EXPECT_EQ(field_of([&] { const RpcListener listener(hub, options); }), "tls-cert");
}

TEST(ServerRpc, ATakenPortIsAnError) {
  RpcServer net;
  ServerHub hub(small_hub());
  ListenOptions options;
  options.address = net.address();
  EXPECT_EQ(field_of([&] { const RpcListener second(hub, options); }), "listen");
  expect_work(net);
}

TEST(ServerRpc, NobodyThereIsSaidAfterTheWorkersPatience) {
  std::string address;
  {
    RpcServer net;
    address = net.address();
  }
  ToyTensors weights(tiny_signature());
  Client client(
      {.signature = tiny_signature(), .dial = make_dialer({address, {}}), .name = "", .id = {}, .patience_s = 1});
  EXPECT_EQ(field_of([&] { client.join(weights.pointers); }), "server");
  EXPECT_EQ(field_of([&] { fetch_status({address, {}}, 1); }), "server");
}

// Those who come to do harm ------------------------------------------------------------------------------------------

TEST(ServerRpc, BytesOfNobodysProtocolHarmNobody) {
  RpcServer net;
  std::mt19937 random(1);
  for (const size_t size : {1u, 24u, 1000u, 100000u}) {
    std::string bytes(size, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    const Socket socket(net.listener.port());
    socket.send(bytes);
    EXPECT_TRUE(size < 24 || socket.closed(120s)) << size;
  }
  const Socket browser(net.listener.port());
  browser.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(browser.closed(120s));
  expect_work(net);
}

TEST(ServerRpc, FramesThatAreNoneEndTheirConnectionWithAReason) {
  RpcServer net;
  const auto end = [&](std::vector<std::byte> bytes) {
    RawRpcClient raw(net.address());
    EXPECT_TRUE(raw.write(bytes));
    return raw.finish();
  };
  const auto head = write_head({.kind = FrameKind::hello}, 0);
  const std::vector<std::byte> good(head.begin(), head.end());
  const auto changed = [&](size_t at, int value) {
    std::vector<std::byte> bytes = good;
    bytes[at] = static_cast<std::byte>(value);
    return bytes;
  };
  const grpc::Status version = end(changed(4, kProtocol - 1));  // a worker of an earlier version
  EXPECT_EQ(version.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_NE(version.error_message().find("protocol is 1; this program speaks 2"), std::string::npos)
      << version.error_message();
  EXPECT_EQ(net.refused("version"), 1u);
  for (const auto& [bytes, field] : {std::pair(changed(0, 'x'), "magic"),
                                     {changed(16, 1), "check"},
                                     {std::vector<std::byte>(20), "shorter"},
                                     {std::vector<std::byte>(0), "shorter"},
                                     {good, "text"}}) {
    const grpc::Status status = end(bytes);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << field;
    EXPECT_NE(status.error_message().find(field), std::string::npos) << status.error_message();
  }
  EXPECT_EQ(net.refused("corrupt"), 5u);
  RawRpcClient early(net.address());
  EXPECT_TRUE(early.write({.kind = FrameKind::pull}));
  EXPECT_NE(early.finish().error_message().find("hello"), std::string::npos);
  RawRpcClient nowhere(net.address(), "/gradwire.Server/Nothing");
  EXPECT_EQ(nowhere.finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  expect_work(net);
}

TEST(ServerRpc, OversizeMessagesAreRefusedAndNotKept) {
  RpcServer net;
  expect_work(net);
  [[maybe_unused]] const double before = resident_mb();
  {  // of somebody who has not even said hello: the connection is cut off before all of it is here
    RawRpcClient stranger(net.address());
    stranger.write(std::vector<std::byte>(kFrameHead + kMaxFrame));
    EXPECT_EQ(stranger.finish().error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_TRUE(eventually([&] { return net.listener.cut_off() == 1; }));
  }
  for (const size_t size : {kFrameHead + kMaxFrame + 1, kFrameHead + kMaxFrame + 4096}) {
    RawRpcClient raw(net.address());
    Frame frame;
    Blob payload;
    ASSERT_TRUE(raw.hello(tiny_signature()) && raw.read(frame, payload));
    raw.write(std::vector<std::byte>(size));
    const grpc::Status status = raw.finish();
    EXPECT_TRUE(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED)
        << status.error_code() << status.error_message();
  }
  EXPECT_EQ(net.refused("oversize"), 1u);
#ifndef __SANITIZE_ADDRESS__  // which keeps what was freed
  EXPECT_TRUE(eventually([&] { return resident_mb() < before + 100; })) << resident_mb() - before;
#endif
  expect_work(net, {}, 2);
}

// Those who never say anything, or never read ------------------------------------------------------------------------

TEST(ServerRpc, WhoDoesNotSayHelloIsSentAway) {
  ListenOptions options;
  options.hello_s = 0.5;
  RpcServer net(small_hub(), options);
  RawRpcClient raw(net.address());
  const grpc::Status status = raw.finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_NE(status.error_message().find("hello"), std::string::npos) << status.error_message();
  EXPECT_TRUE(eventually([&] { return net.hub.status()["connections"] == 0; }));
}

TEST(ServerRpc, ConnectionsBeyondTheLimitAreRefusedWithWords) {
  ListenOptions options;
  options.max_connections = 3;
  options.hello_s = 3600;  // none of them is sent away for its silence
  RpcServer net(small_hub(), options);
  std::vector<std::unique_ptr<RawRpcClient>> idle;
  for (int i = 0; i < 3; ++i) idle.push_back(std::make_unique<RawRpcClient>(net.address()));
  EXPECT_TRUE(eventually([&] { return net.hub.status()["connections"] == 3; }));
  EXPECT_EQ(refusal(net, {}, tiny_signature(), "3 connections"), RefusalReason(ErrorKind::mismatch, "full"));
  EXPECT_EQ(net.refused("full"), 1u);
  idle.pop_back();
  EXPECT_TRUE(eventually([&] { return net.hub.status()["connections"] == 2; }));
  expect_work(net);
}

TEST(ServerRpc, AThousandIdleConnectionsCostLittleAreClosedAndHoldNobodyUp) {
  constexpr int kIdle = 1000;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 3 * kIdle) GTEST_SKIP() << "this machine allows " << limit.rlim_cur << " files";
  // All of them must be open at the same time before the first is sent away for its silence. How long that takes is the
  // machine's business: where they were too late, they get twice the time.
  std::unique_ptr<RpcServer> net;
  std::unique_ptr<ToyWorker> toy;
  std::vector<Socket> idle;
  double before = 0;
  int most = 0;
  for (double hello_s = 6; most < kIdle && hello_s < 200; hello_s *= 2) {
    idle.clear();
    toy.reset();
    net.reset();
    ListenOptions options;
    options.hello_s = hello_s;
    net = std::make_unique<RpcServer>(small_hub(), options);
    toy = make_toy(*net);
    toy->join();
    toy->work();
    before = resident_mb();
    for (int i = 0; i < kIdle; ++i) {
      idle.emplace_back(net->listener.port());
      ASSERT_TRUE(idle.back().connected()) << i;
      ASSERT_TRUE(idle.back().send(bare_call())) << i;
    }
    const auto opened = SteadyClock::now();
    while (most < kIdle && seconds_since(opened) < hello_s)
      most = std::max(most, net->hub.status()["connections"].get<int>());
  }
  EXPECT_GE(most, kIdle);
  for (int i = 0; i < 20; ++i) toy->work();
  const double grown = resident_mb() - before;
  EXPECT_LT(grown, 200) << "MB for " << kIdle << " connections";
  EXPECT_TRUE(eventually([&] { return net->hub.status()["connections"] == 1; }));
  for (size_t i = 0; i < idle.size(); ++i) ASSERT_TRUE(idle[i].closed(120s)) << i;
  toy->work();
  EXPECT_EQ(toy->client.counts().reconnects, 0u);
  EXPECT_EQ(toy->step, 22u);
  RecordProperty("megabytes", std::to_string(grown));
  RecordProperty("connections", most);
}

TEST(ServerRpc, WhoAsksAndNeverReadsIsCutOffAndCostsLittle) {
  ListenOptions options;
  options.stall_s = 5;
  HubOptions hub = small_hub();
  hub.deadline_s = 0.3;
  RpcServer net(hub, options);
  const Signature signature = large_signature();
  const auto toy = make_toy(net, {}, 1, signature);
  toy->join();
  toy->work();
  const double before = resident_mb();
  RawRpcClient raw(net.address(), kWorkMethod, 600s);
  ASSERT_TRUE(raw.hello(signature));
  std::thread asker([&] {  // as fast as it can, for ever; each answer would be a megabyte
    for (int i = 0; i < 20000 && raw.write({.kind = FrameKind::pull, .step = 0}); ++i) {
    }
  });
  const auto vanished = [&] {
    const nlohmann::json status = net.hub.status();
    for (const nlohmann::json& one : status["workers"]["list"])
      if (one["name"] == "raw") return one["state"] == "gone";
    return false;
  };
  double most = 0;
  const auto until = SteadyClock::now() + 120s;
  while (!vanished() && SteadyClock::now() < until) {
    toy->work();
    most = std::max(most, resident_mb() - before);
  }
  raw.cancel();  // or it waits for room until its own deadline
  asker.join();
  EXPECT_TRUE(vanished());
  EXPECT_LT(most, 200) << "MB";
  EXPECT_FALSE(raw.finish().ok());
  toy->work();
  EXPECT_EQ(toy->client.counts().reconnects, 0u);
}

// A peer that is connected and begins calls, as many as it likes.
TEST(ServerRpc, AConnectionThatBeginsManyCallsIsCutOff) {
  RpcServer net;
  const auto toy = make_toy(net);
  toy->join();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  grpc::GenericStub stub(grpc::CreateCustomChannel(net.address(), grpc::InsecureChannelCredentials(), arguments));
  grpc::CompletionQueue queue;
  const auto answered = [&] {
    grpc::ClientContext context;
    const auto call = stub.PrepareUnaryCall(&context, kStatusMethod, grpc::ByteBuffer(), &queue);
    call->StartCall();
    grpc::ByteBuffer answer;
    grpc::Status status;
    call->Finish(&answer, &status, nullptr);
    void* tag;
    bool ok;
    return queue.Next(&tag, &ok) && ok && status.ok();
  };
  int calls = 0;
  while (answered() && calls < 10000) ++calls;
  EXPECT_GE(calls, 60) << "few calls are nothing";
  EXPECT_LT(calls, 10000);
  EXPECT_TRUE(eventually([&] { return net.listener.cut_off() >= 1; }));
  EXPECT_EQ(toy->work(), 1u);
  EXPECT_EQ(toy->client.counts().reconnects, 0u);
}

TEST(ServerRpc, SocketsAreCountedAndTheirNumberIsBounded) {
  ListenOptions options;
  options.max_connections = 8;  // and 2 x 8 + 16 sockets
  RpcServer net(small_hub(), options);
  const auto toy = make_toy(net);
  toy->join();
  std::vector<Socket> crowd;
  for (int i = 0; i < 100; ++i) crowd.emplace_back(net.listener.port());
  EXPECT_TRUE(eventually([&] { return net.listener.cut_off() > 60; })) << net.listener.cut_off();
  EXPECT_LE(net.listener.sockets(), 32u);
  EXPECT_EQ(toy->work(), 1u);
  EXPECT_EQ(fetch_status({net.address(), {}}, kPatience)["step"], 1) << "the newest comes in";
  EXPECT_EQ(net.listener.trouble(), "");
  crowd.clear();
  EXPECT_TRUE(eventually([&] { return net.listener.sockets() <= 1; }));
  EXPECT_EQ(toy->client.counts().reconnects, 0u);
}

// Many, and what bytes cost ------------------------------------------------------------------------------------------

TEST(ServerRpc, SixtyFourWorkersAtOnceHoldTheSameWeights) {
  constexpr uint64_t kWorkers = 64, kSteps = 12;
  HubOptions options = small_hub(kWorkers);
  RpcServer net(options);
  std::vector<std::unique_ptr<ToyWorker>> toys;
  for (uint64_t i = 0; i < kWorkers; ++i) toys.push_back(make_toy(net, {}, i + 1));
  std::vector<std::thread> threads;
  for (auto& toy : toys)
    threads.emplace_back([&] {
      toy->join();
      while (toy->step < kSteps) toy->work();
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& toy : toys) {
    EXPECT_EQ(toy->weights.values, toys[0]->weights.values);
    EXPECT_EQ(toy->client.counts().late, 0u);
  }
  const nlohmann::json status = fetch_status({net.address(), {}}, kPatience);
  EXPECT_EQ(status["step"], kSteps);
  EXPECT_EQ(status["workers"]["present"], kWorkers);
  // All go the same way here, so that their sum is far larger than the root of their squares: by the sum.
  const nlohmann::json ledger = status["ledger"];
  EXPECT_LT(std::fabs(ledger["difference"].get<double>()), 1e-6 * std::fabs(ledger["computed"].get<double>()))
      << ledger.dump();
}

TEST(ServerRpc, OnTheSocketThereAreHardlyMoreBytesThanInMessages) {
  for (const bool tls : {false, true}) {
    ListenOptions options;
    if (tls) options.security = Certificates::get().server(true);
    RpcServer net(small_hub(), options);
    const CountingProxy relay(net.listener.port());
    const Signature signature = large_signature();
    ToyWorker toy(make_dialer({relay.address(), tls ? Certificates::get().worker(true) : Security{}}), signature, 1);
    toy.join();
    const auto messages = [&] { return toy.client.counts().messages_up + toy.client.counts().messages_down; };
    const uint64_t bytes_before = relay.bytes(), messages_before = messages();
    for (int i = 0; i < 6; ++i) toy.work();
    const double ratio =
        static_cast<double>(relay.bytes() - bytes_before) / static_cast<double>(messages() - messages_before);
    EXPECT_LE(ratio, 1.02) << (tls ? "TLS" : "plain");
    EXPECT_GE(ratio, 0.99) << "the relay has not counted everything";
    const double steps = 6, fp32 = 4.0 * static_cast<double>(signature.elements());
    EXPECT_LE(static_cast<double>(messages() - messages_before) / steps, (0.10 + 0.26) * fp32);
    RecordProperty(tls ? "tls" : "plain", std::to_string(ratio));
    EXPECT_TRUE(toy.client.leave(kPatience));
  }
}

TEST(ServerRpc, StatusIsAskedOfAServerThatHasNoWorkers) {
  RpcServer net;
  const nlohmann::json status = fetch_status({net.address(), {}}, kPatience);
  EXPECT_EQ(status["state"], "waiting for the first worker");
  EXPECT_EQ(status["connections"], 0);
}

TEST(ServerRpc, AServerStopsWhileAWorkerWaitsAndOneThatForgotEverythingIsToldApart) {
  auto net = std::make_unique<RpcServer>(small_hub(2));  // the second never comes
  ListenOptions options;
  options.address = net->address();
  ToyWorker toy(net->dialer(), tiny_signature(), 1);
  toy.join();
  std::string told;
  std::thread waits([&] { told = field_of([&] { toy.work(); }); });
  EXPECT_TRUE(eventually([&] { return net->hub.status()["bytes"]["up"] > 0; }));
  net->hub.stop();
  net.reset();  // returns although the worker stays
  ServerHub hub(small_hub());
  const RpcListener listener(hub, options);
  waits.join();
  EXPECT_EQ(told, "server");
}

}  // namespace
}  // namespace gradwire::server
