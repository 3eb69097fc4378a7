// SPDX-License-Identifier: Apache-2.0
// The port for watching a server: what its paths answer, that it is bounded and cannot be held up by slow, silent or
// hostile clients, and how a status reads for Prometheus and for people. Statuses are made up; clients are plain
// sockets, so that they can misbehave.
#include "server/watch/watch.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <regex>
#include <thread>
#include <vector>

#include "gradwire/error.h"
#include "server/watch/metrics.h"
#include "server/watch/status_text.h"

namespace gradwire::server {
namespace {

using nlohmann::json;

// The seconds after which a test gives up waiting. No test passes or fails by how much of it a machine needs.
constexpr int kPatience = 120;
// For tests in which the server must not be able to get rid of a slow client by waiting for its limits.
constexpr HttpTimeouts kNoTimeouts{std::chrono::hours(1), std::chrono::hours(1), std::chrono::hours(1)};
const WatchOptions kPatient{.timeouts = kNoTimeouts};

json worker(const std::string& id, const std::string& name, const std::string& state = "present") {
  return {{"id", id},         {"name", name},       {"peer", "10.0.0.7:41234"}, {"state", state}, {"step", 1233},
          {"staleness", 1},   {"lag_s", 0.25},      {"updates", 1200},          {"late", 3},      {"loss", 0.5},
          {"bytes_up", 1000}, {"bytes_down", 2000}, {"joined_s", 60.5}};
}

json example() {
  return json::parse(R"({"version": 1, "name": "gradwire", "mode": "sync", "state": "training", "uptime_s": 7265.5,
    "step": 1234, "durable_step": 1200, "steps_per_s": 3.25, "loss": 0.4321, "losses": [[1, 2.5], [2, 2.25]],
    "model": {"tensors": 65, "elements": 272474, "parts": 4}, "up": "loggrid:k=2", "down": "unigrid:bits=8",
    "send": "weights",
    "workers": {"present": 1, "min": 2, "max": 64, "list": []},
    "bytes": {"up": 9400000, "down": 26000000, "fp32_up": 100000000, "fp32_down": 100000000},
    "staleness": {"mean": 0.5, "max": 2, "bound": null},
    "ledger": {"computed": 100.5, "applied": 98.5, "held": 2.0, "lost": 0.0, "difference": 1e-12,
               "magnitude": 1000.0, "relative": 1e-15},
    "refused": {"late": 2, "corrupt": 0, "token": 1, "signature": 0, "version": 0, "full": 0, "oversize": 0},
    "checkpoint": {"path": "ps.gwc", "every": 100, "saved": 12, "failed": 0, "last_error": null, "last_s": 12.5,
                   "bytes": 2200000},
    "memory_bytes": 120000000, "connections": 3, "build": {"version": "1.2.3", "commit": "0123abc"},
    "step_seconds": {"at_most": [[0.1, 3], [1, 4]], "sum": 1.5, "count": 5},
    "process": {"resident_bytes": 26400000, "open_files": 21, "start_time": 1700000000.5}})");
}

json with_worker(const json& one) {
  json status = example();
  status["workers"]["list"].push_back(one);
  return status;
}

// A TCP client that does what it is told. Reads give up after kPatience.
class HttpClient {
 public:
  explicit HttpClient(int port, int receive_buffer = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer) ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    const timeval patience{kPatience, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~HttpClient() { ::close(socket_); }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  bool connected() const { return connected_; }
  bool send(std::string_view text) {
    while (!text.empty()) {
      const ssize_t count = ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      text.remove_prefix(static_cast<size_t>(count));
    }
    return true;
  }
  // Until the other side closes; what was read before an error counts.
  std::string read_all() {
    std::string text;
    char buffer[4096];
    ssize_t count;
    while ((count = ::recv(socket_, buffer, sizeof buffer, 0)) > 0) text.append(buffer, static_cast<size_t>(count));
    ended_ = count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    return text;
  }
  // Whether the other side closed the connection, so that read_all() did not end by giving up.
  bool ended() const { return ended_; }
  // One answer with a Content-Length, from a connection that stays open.
  std::string read_one() {
    std::string text;
    char c;
    while (text.find("\r\n\r\n") == std::string::npos && ::recv(socket_, &c, 1, 0) == 1) text += c;
    std::smatch found;
    size_t length = 0;
    if (std::regex_search(text, found, std::regex("Content-Length: (\\d+)"))) length = std::stoul(found[1]);
    for (size_t i = 0; i < length && ::recv(socket_, &c, 1, 0) == 1; ++i) text += c;
    return text;
  }

 private:
  int socket_;
  bool connected_ = false, ended_ = false;
};

std::string request(int port, const std::string& path, const std::string& method = "GET",
                    const std::string& body = "") {
  HttpClient client(port);
  std::string text = method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
  if (!body.empty()) text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  client.send(text + "\r\n" + body);
  return client.read_all();
}

int code(const std::string& answer) { return answer.size() > 12 ? std::atoi(answer.c_str() + 9) : 0; }
std::string body(const std::string& answer) {
  const size_t end = answer.find("\r\n\r\n");
  return end == std::string::npos ? "" : answer.substr(end + 4);
}

// Endpoints -----------------------------------------------------------------------------------------------------------

TEST(Watch, EveryPathHasItsTypeAndTheHeadersThatKeepAPageSafe) {
  const Watch watch("127.0.0.1", 0, example);
  const std::vector<std::pair<std::string, std::string>> types = {
      {"/", "text/html; charset=utf-8"},
      {"/page.css", "text/css; charset=utf-8"},
      {"/page.js", "text/javascript; charset=utf-8"},
      {"/status.json", "application/json"},
      {"/metrics", "text/plain; version=0.0.4; charset=utf-8"},
      {"/healthz", "text/plain; charset=utf-8"},
      {"/nothing", "text/plain; charset=utf-8"}};
  for (const auto& [path, type] : types) {
    const std::string answer = request(watch.port(), path);
    EXPECT_EQ(code(answer), path == "/nothing" ? 404 : 200) << path;
    EXPECT_NE(answer.find("Content-Type: " + type + "\r\n"), std::string::npos) << answer;
    EXPECT_NE(answer.find("Content-Security-Policy: default-src 'none';"), std::string::npos) << path;
    EXPECT_NE(answer.find("frame-ancestors 'none'"), std::string::npos) << path;
    EXPECT_NE(answer.find("X-Content-Type-Options: nosniff"), std::string::npos) << path;
    EXPECT_EQ(answer.find("Set-Cookie"), std::string::npos) << path;
    EXPECT_FALSE(body(answer).empty()) << path;
  }
  EXPECT_EQ(json::parse(body(request(watch.port(), "/status.json?now=1"))), example()) << "a query changes nothing";
}

TEST(Watch, ThePageAsksForNothingFromElsewhere) {
  const Watch watch("127.0.0.1", 0, example);
  for (const char* path : {"/", "/page.css", "/page.js"}) {
    const std::string text = body(request(watch.port(), path));
    const std::string rest = std::regex_replace(text, std::regex("http://www\\.w3\\.org/2000/svg"), "");
    EXPECT_EQ(rest.find("http:"), std::string::npos) << path;
    EXPECT_EQ(rest.find("https:"), std::string::npos) << path;
    EXPECT_EQ(rest.find("innerHTML"), std::string::npos) << path;
  }
}

TEST(Watch, OtherMethodsAreRefusedAndHeadHasNoBody) {
  std::atomic<int> calls = 0;
  const Watch watch("127.0.0.1", 0, [&] {
    ++calls;
    return example();
  });
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X"})
    for (const char* path : {"/", "/status.json", "/nothing"}) {
      const std::string answer = request(watch.port(), path, method, method[1] == 'O' ? "a body" : "");
      EXPECT_EQ(code(answer), 405) << method << " " << path;
      EXPECT_NE(answer.find("Allow: GET, HEAD\r\n"), std::string::npos);
    }
  EXPECT_EQ(calls, 0);
  const std::string head = request(watch.port(), "/status.json", "HEAD");
  EXPECT_EQ(code(head), 200);
  EXPECT_EQ(body(head), "");
  EXPECT_NE(head.find("Content-Length: " + std::to_string(example().dump().size())), std::string::npos);
}

TEST(Watch, AStatusThatFailsIsSaidAndRecovers) {
  std::atomic<bool> fails = true;
  const Watch watch("127.0.0.1", 0, [&]() -> json {
    if (fails) throw std::runtime_error("the disk is on fire");
    return example();
  });
  const std::string answer = request(watch.port(), "/metrics");
  EXPECT_EQ(code(answer), 503);
  EXPECT_EQ(body(answer), "no status: the disk is on fire\n");
  EXPECT_EQ(request(watch.port(), "/healthz").substr(9, 3), "503") << "a server without a status is not well";
  fails = false;
  const auto start = SteadyClock::now();
  int last = 0;
  while (last != 200 && seconds_since(start) < kPatience) last = code(request(watch.port(), "/status.json"));
  EXPECT_EQ(last, 200);
}

TEST(Watch, AConnectionServesManyRequestsAlsoWhenTheyComeTogether) {
  const Watch watch("127.0.0.1", 0, example);
  HttpClient client(watch.port());
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(client.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    ASSERT_EQ(body(client.read_one()), "ok\n") << i;
  }
  ASSERT_TRUE(client.send("GET /healthz HTTP/1.1\r\n\r\nGET /nothing HTTP/1.1\r\n\r\nGET /healthz HTTP/1.0\r\n\r\n"));
  const std::string first = client.read_one(), rest = client.read_all();
  EXPECT_EQ(code(first), 200);
  EXPECT_EQ(code(rest), 404);
  EXPECT_NE(rest.find("HTTP/1.1 200 OK", 12), std::string::npos) << "and HTTP/1.0 ends the connection";
}

// Addresses -----------------------------------------------------------------------------------------------------------

TEST(Watch, ATakenPortIsAnErrorThatNamesAddressAndReason) {
  const Watch first("127.0.0.1", 0, example);
  try {
    const Watch second("127.0.0.1", first.port(), example);
    FAIL() << "two on one port";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_EQ(error.field(), "watch");
    EXPECT_EQ(error.what(),
              "watch: cannot listen on 127.0.0.1:" + std::to_string(first.port()) + ": Address already in use");
  }
  EXPECT_EQ(code(request(first.port(), "/healthz")), 200);
}

TEST(Watch, AddressesThatCannotBeAreErrors) {
  for (const auto& [host, port] : std::vector<std::pair<std::string, int>>{
           {"127.0.0.1", 65536}, {"127.0.0.1", -1}, {"256.1.1.1.1", 0}, {"192.0.2.1", 0}}) {
    try {
      const Watch watch(host, port, example);
      FAIL() << host << ":" << port;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io);
      EXPECT_NE(std::string(error.what()).find(host + ":" + std::to_string(port)), std::string::npos) << error.what();
    }
  }
}

TEST(Watch, APortIsFreeAgainWhenTheWatchIsGone) {
  int port = 0;
  for (int i = 0; i < 5; ++i) {
    const Watch watch("127.0.0.1", port, example);
    port = watch.port();
    EXPECT_EQ(code(request(port, "/healthz")), 200);
  }
}

// Bounds --------------------------------------------------------------------------------------------------------------

TEST(Watch, AHundredPollersCostFewStatuses) {
  std::atomic<int> calls = 0;
  const Watch watch("127.0.0.1", 0, [&] {
    ++calls;
    return example();
  });
  const auto start = SteadyClock::now();
  std::atomic<int> good = 0;
  std::vector<std::thread> pollers;
  for (int t = 0; t < 10; ++t)
    pollers.emplace_back([&] {
      for (int i = 0; i < 10; ++i) good += code(request(watch.port(), i % 2 ? "/status.json" : "/metrics")) == 200;
    });
  for (std::thread& poller : pollers) poller.join();
  EXPECT_EQ(good, 100);
  EXPECT_GE(calls, 1);
  EXPECT_LE(calls, 1 + seconds_since(start) / 0.25);
}

TEST(Watch, AnOldStatusIsMadeAgain) {
  std::atomic<int> calls = 0;
  const Watch watch("127.0.0.1", 0, [&] { return json{{"step", ++calls}}; });
  const auto start = SteadyClock::now();
  int step = 0;
  while (step < 3 && seconds_since(start) < kPatience)
    step = json::parse(body(request(watch.port(), "/status.json")))["step"];
  EXPECT_EQ(step, 3);
  EXPECT_GE(seconds_since(start), 0.49) << "two times 250 ms";
}

TEST(Watch, SlowAndSilentClientsDoNotKeepOthersWaiting) {
  const Watch watch(
      "127.0.0.1", 0,
      [] {
        json status = example();
        status["name"] = std::string(8 << 20, 'x');  // more than the buffers of a connection hold
        return status;
      },
      kPatient);
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (int i = 0; i < 60; ++i) {
    slow.push_back(std::make_unique<HttpClient>(watch.port(), i % 3 == 0 ? 4096 : 0));
    if (i % 3 == 0) slow.back()->send("GET /status.json HTTP/1.1\r\n\r\n");  // and never reads
    if (i % 3 == 1) slow.back()->send("GET /healthz HTT");                   // and never ends
  }
  // None of the slow ones ever goes away: a server that waited for one of them would never answer.
  for (int i = 0; i < 20; ++i) ASSERT_EQ(code(request(watch.port(), "/healthz")), 200) << i;
}

TEST(Watch, ARequestThatTricklesInIsCutOff) {
  HttpTimeouts timeouts = kNoTimeouts;
  timeouts.arrival = std::chrono::milliseconds(500);
  const Watch watch("127.0.0.1", 0, example, {.timeouts = timeouts});
  HttpClient client(watch.port());
  const auto start = SteadyClock::now();
  bool open = client.send("GET / HTTP/1.1\r\nX: ");
  while (open && seconds_since(start) < kPatience) {
    open = client.send("a");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // bytes keep coming, and do not buy it more time
  }
  EXPECT_FALSE(open);
  EXPECT_GE(seconds_since(start), 0.49);
}

TEST(Watch, TheConnectionBeyondTheLimitTakesThePlaceOfTheSlowest) {
  const Watch watch("127.0.0.1", 0, example, kPatient);
  std::vector<std::unique_ptr<HttpClient>> busy;
  for (size_t i = 0; i < HttpServer::kMaxConnections; ++i) {
    busy.push_back(std::make_unique<HttpClient>(watch.port()));
    ASSERT_TRUE(busy.back()->send("GET /healthz HTTP/1.1\r\n\r\n"));
    ASSERT_EQ(code(busy.back()->read_one()), 200);
  }
  EXPECT_EQ(code(request(watch.port(), "/healthz")), 200) << "the oldest idle one made room";
  EXPECT_EQ(busy.front()->read_all(), "");
  busy.erase(busy.begin());
  while (busy.size() < HttpServer::kMaxConnections) busy.push_back(std::make_unique<HttpClient>(watch.port()));
  for (auto& client : busy) ASSERT_TRUE(client->send("GET /healthz"));
  // None of them is idle any more once the server has read what they sent; the newest comes in nevertheless.
  for (int i = 0; i < 3; ++i) EXPECT_EQ(code(request(watch.port(), "/healthz")), 200) << i;
  int answered = 0;
  for (auto& client : busy) answered += client->send(" HTTP/1.1\r\n\r\n") && code(client->read_one()) == 200;
  EXPECT_GE(answered, static_cast<int>(HttpServer::kMaxConnections) - 4) << "only the slowest had to go";
}

TEST(Watch, EightySlowSocketsDoNotKeepAProbeWaiting) {
  const Watch watch("127.0.0.1", 0, example, kPatient);
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (int i = 0; i < 80; ++i) {
    slow.push_back(std::make_unique<HttpClient>(watch.port()));
    slow.back()->send("GET /healthz HTTP/1.1\r\nX: ");
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(code(request(watch.port(), "/healthz")), 200) << i;
    slow[static_cast<size_t>(i)] = std::make_unique<HttpClient>(watch.port());  // who was dropped comes again
    slow[static_cast<size_t>(i)]->send("GET /healthz HTTP/1.1\r\nX: ");
  }
}

TEST(Watch, OnlyNamesOfThisServerAreAnswered) {
  const Watch watch("127.0.0.1", 0, example, {.hosts = {"watch.example.org"}});
  const auto asked = [&](const std::string& host) {
    HttpClient client(watch.port());
    client.send("GET /status.json HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n");
    return code(client.read_all());
  };
  for (const char* host : {"localhost", "localhost:7071", "LOCALHOST", "127.0.0.1", "127.0.0.1:1", "watch.example.org",
                           "Watch.Example.Org:443"})
    EXPECT_EQ(asked(host), 200) << host;
  for (const char* host : {"evil.example", "evil.example:7071", "127.0.0.1.evil.example", "192.0.2.1", "[::1]", "x"})
    EXPECT_EQ(asked(host), 421) << host;
}

TEST(Watch, HealthSaysWhatIsWrong) {
  std::atomic<bool> starved = false, full = false;
  const Watch watch("127.0.0.1", 0,
                    [&] {
                      json status = example();
                      if (full) status["checkpoint"]["last_error"] = "No space left on device";
                      return status;
                    },
                    {.trouble = [&] { return std::string(starved ? "no descriptors are left" : ""); }});
  const auto becomes = [&](int wanted, const std::string& words) {
    const auto start = SteadyClock::now();
    std::string last;
    while (seconds_since(start) < kPatience) {
      last = request(watch.port(), "/healthz");
      if (code(last) == wanted && last.find(words) != std::string::npos) return true;
    }
    return false;
  };
  EXPECT_TRUE(becomes(200, "ok"));
  starved = true;
  EXPECT_TRUE(becomes(503, "workers cannot connect: no descriptors are left"));
  starved = false;
  full = true;
  EXPECT_TRUE(becomes(503, "the checkpoint cannot be saved: No space left on device"));
  full = false;
  EXPECT_TRUE(becomes(200, "ok"));
}

TEST(Watch, RequestsThatAreTooLongOrNoHttpAreRefused) {
  const Watch watch("127.0.0.1", 0, example);
  const std::vector<std::pair<std::string, int>> requests = {
      {"GET /" + std::string(2000, 'a') + " HTTP/1.1\r\n\r\n", 414},
      {"GET /" + std::string(200000, 'a'), 414},
      {"GET / HTTP/1.1\r\nX: " + std::string(20000, 'a') + "\r\n\r\n", 431},
      {"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413},
      {"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413},
      {"GET / HTTP/2.0\r\n\r\n", 505},
      {"GET / a b HTTP/1.1\r\n\r\n", 400},
      {"GET /\r\n\r\n", 400},
      {"\x16\x03\x01\x02 hello over tls\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400},
      {"\r\n\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.0\r\n\r\n", 200},
      {"GET /../../etc/passwd HTTP/1.0\r\n\r\n", 404},
      {"GET /%2e%2e/ HTTP/1.0\r\n\r\n", 404},
      {std::string("GET /\0 HTTP/1.0\r\n\r\n", 19), 404},
  };
  for (const auto& [text, status] : requests) {
    HttpClient client(watch.port());
    client.send(text);
    EXPECT_EQ(code(client.read_all()), status) << text.substr(0, 60);
  }
  EXPECT_EQ(code(request(watch.port(), "/healthz")), 200);
}

TEST(Watch, StoppingDoesNotWaitForClients) {
  auto watch = std::make_unique<Watch>("127.0.0.1", 0, example, kPatient);
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 10; ++i) {
    clients.push_back(std::make_unique<HttpClient>(watch->port()));
    clients.back()->send(i % 2 ? "GET /status.json HTTP/1.1\r\n\r\n" : "GET /stat");
  }
  std::promise<void> stopped;
  std::thread stopper([&] {
    watch.reset();
    stopped.set_value();
  });
  const bool done = stopped.get_future().wait_for(std::chrono::seconds(kPatience)) == std::future_status::ready;
  EXPECT_TRUE(done) << "it waits for clients that stay";
  if (!done) clients.clear();
  stopper.join();
  for (auto& client : clients) {
    client->read_all();
    EXPECT_TRUE(client->ended()) << "the clients are not told";
  }
}

// Metrics -------------------------------------------------------------------------------------------------------------

// The grammar of the format, line by line: every sample belongs to the family announced last, no series comes twice.
void check_format(const std::string& text) {
  static const std::regex kHelp("# HELP ((?:gradwire|process)_[a-z0-9_]+) [^\n]+"),
      kType("# TYPE ((?:gradwire|process)_[a-z0-9_]+) (gauge|counter|histogram)"),
      kSample(
          "((?:gradwire|process)_[a-z0-9_]+?)(?:_bucket|_sum|_count)?(\\{[a-z_]+=\"([^\"\\\\]|\\\\[\\\\\"n])*\"(,[a-z_]"
          "+=\"([^\"\\\\]|\\\\[\\\\\"n])*\")*\\}"
          ")? "
          "-?[0-9.]+(e[+-]?[0-9]+)?");
  ASSERT_TRUE(text.ends_with("\n"));
  std::istringstream lines(text);
  std::string line, help, family;
  std::set<std::string> families, series;
  while (std::getline(lines, line)) {
    std::smatch found;
    if (std::regex_match(line, found, kHelp)) {
      help = found[1];
      EXPECT_TRUE(families.insert(help).second) << line;
    } else if (std::regex_match(line, found, kType)) {
      family = found[1];
      EXPECT_EQ(family, help);
      EXPECT_EQ(family.ends_with("_total"), found[2] == "counter") << line;
    } else {
      ASSERT_TRUE(std::regex_match(line, found, kSample)) << line;
      EXPECT_TRUE(found[1] == family || line.starts_with(family)) << line;
      EXPECT_TRUE(series.insert(line.substr(0, line.rfind(' '))).second) << line;
    }
  }
  EXPECT_GT(series.size(), 20u);
}

TEST(Metrics, SayWhatTheStatusSays) {
  json status = with_worker(worker("0a1b2c3d", "node-7"));
  status["skipped_steps"] = 700;
  status["failed"] = true;
  const std::string text = metrics_text(status);
  check_format(text);
  for (const char* line : {
           "# TYPE gradwire_steps_total counter\ngradwire_steps_total 1234\n",
           "gradwire_skipped_steps_total 700\n",
           "# TYPE gradwire_training_failed gauge\ngradwire_training_failed 1\n",
           "gradwire_build_info{version=\"1.2.3\",commit=\"0123abc\"} 1\n",
           "# TYPE gradwire_step_seconds histogram\ngradwire_step_seconds_bucket{le=\"0.1\"} 3\n",
           "gradwire_step_seconds_bucket{le=\"+Inf\"} 5\ngradwire_step_seconds_sum 1.5\ngradwire_step_seconds_count "
           "5\n",
           "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 26400000\n",
           "process_open_fds 21\n",
           "process_start_time_seconds 1700000000.5\n",
           "gradwire_model_bytes 120000000\n",
           "gradwire_info{mode=\"sync\",up=\"loggrid:k=2\",down=\"unigrid:bits=8\",send=\"weights\"} 1\n",
           "gradwire_state{state=\"training\"} 1\n",
           "gradwire_state{state=\"stopping\"} 0\n",
           "gradwire_bytes_total{direction=\"up\"} 9400000\n",
           "gradwire_fp32_bytes_total{direction=\"down\"} 100000000\n",
           "gradwire_refused_total{reason=\"token\"} 1\n",
           "gradwire_ledger_relative_difference 1e-15\n",
           "# TYPE gradwire_worker_late_total counter\ngradwire_worker_late_total{id=\"0a1b2c3d\",name=\"node-7\"} 3\n",
           "gradwire_worker_bytes_total{id=\"0a1b2c3d\",name=\"node-7\",direction=\"down\"} 2000\n",
       })
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  EXPECT_EQ(text.find("staleness_bound"), std::string::npos) << "null has no sample and no family";
  for (const char* old : {"gradwire_memory_bytes", "gradwire_step ", "gradwire_steps_per_second", "staleness_mean"})
    EXPECT_EQ(text.find(old), std::string::npos) << old;
}

TEST(Metrics, HostileNamesStayWithinTheirLabel) {
  json status = example();
  json& list = status["workers"]["list"];
  list.push_back(worker("00000001", "a\"} 1\ngradwire_step 9\\"));
  list.push_back(worker("00000002", "\xff\xfe not utf-8 \r\n\t\x1b[2J"));
  list.push_back(worker("00000002", "\xff\xfe not utf-8 \r\n\t\x1b[2J"));  // twice
  list.push_back(worker("00000003", std::string("nul\0nul", 7)));
  list.push_back(worker("00000004", "</script><script>alert(1)</script>"));
  list.push_back(worker("00000005", "was here", "gone"));
  const std::string text = metrics_text(status);
  check_format(text);
  EXPECT_NE(text.find("gradwire_worker_step{id=\"00000001\",name=\"a\\\"} 1\\ngradwire_step 9\\\\\"} 1233\n"),
            std::string::npos);
  EXPECT_EQ(text.find("\ngradwire_step 9"), std::string::npos);
  EXPECT_EQ(text.find("00000005"), std::string::npos) << "gone";
  EXPECT_NO_THROW(json(text).dump()) << "UTF-8";
  for (const char c : text) EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= ' ') << int{c};
}

TEST(Metrics, NeedNothing) {
  for (const json& status : {json::object(), json(), json::array(), json{{"workers", {{"list", {1, nullptr, "x"}}}}}})
    EXPECT_NE(metrics_text(status).find("gradwire_info{"), std::string::npos);
  json status = example();
  status["loss"] = nullptr;
  status["steps_per_s"] = std::nan("");
  EXPECT_EQ(metrics_text(status).find("gradwire_loss"), std::string::npos);
  status["process"] = json::object();
  EXPECT_EQ(metrics_text(status).find("process_"), std::string::npos);
}

TEST(Watch, HostileNamesLeaveTheJsonWhole) {
  const std::string name = "\xff</script><script>alert(1)</script>\"\n\\";
  const Watch watch("127.0.0.1", 0, [&] { return with_worker(worker("00000001", name)); });
  const json status = json::parse(body(request(watch.port(), "/status.json")));
  EXPECT_EQ(status["workers"]["list"][0]["name"], "\xEF\xBF\xBD" + name.substr(1));
}

// For people ----------------------------------------------------------------------------------------------------------

TEST(StatusText, ReadsAsItShould) {
  json status = example();
  status["workers"]["list"] = {worker("0a1b2c3d", "node-7"),
                               worker("11112222", "a-much-longer-name-than-that", "lagging")};
  EXPECT_EQ(
      status_text(status),
      "gradwire server: training, sync, up 2 h 01 min\n"
      "\n"
      "step        1,234, on disk 1,200\n"
      "speed       3.25 steps/s\n"
      "loss        0.4321\n"
      "workers     1 present, 2 needed, 64 at most\n"
      "model       65 tensors, 272,474 elements, 4 shards\n"
      "codecs      up loggrid:k=2, down unigrid:bits=8 (weights)\n"
      "bytes up    9.4 MB, 0.094 of fp32\n"
      "bytes down  26 MB, 0.260 of fp32\n"
      "staleness   mean 0.5, largest 2\n"
      "ledger      ok: off by 1.0e-15 relative (allowed 1e-06)\n"
      "            computed 100.5 = applied 98.5 + held 2 + lost 0\n"
      "refused     2 late, 1 token\n"
      "checkpoint  ps.gwc, every 100 steps\n"
      "            12 saved, the last 12 s ago, 2.2 MB\n"
      "memory      120 MB, 3 connections\n"
      "\n"
      "worker    name                         state     step  stale    lag  updates  late  loss    up  down  address\n"
      "0a1b2c3d  node-7                       present  1,233      1  0.2 s    1,200     3   0.5  1 kB  2 kB  "
      "10.0.0.7:41234\n"
      "11112222  a-much-longer-name-than-...  lagging  1,233      1  0.2 s    1,200     3   0.5  1 kB  2 kB  "
      "10.0.0.7:41234\n");
}

TEST(StatusText, SaysWhenTheLedgerIsOffAndACheckpointFailed) {
  json status = example();
  status["ledger"]["relative"] = 3.1e-5;
  status["checkpoint"]["failed"] = 2;
  status["checkpoint"]["last_error"] = "No space left on device";
  status["staleness"]["bound"] = 4;
  status["skipped_steps"] = 7000;
  EXPECT_NE(status_text(status).find("skipped     7,000 steps, not finite\n"), std::string::npos);
  status["failed"] = true;
  const std::string text = status_text(status);
  EXPECT_NE(text.find("skipped     7,000 steps, not finite: more than half, so the training has FAILED\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("ledger      OFF by 3.1e-05 relative (only allowed 1e-06)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("            2 FAILED, the last: No space left on device\n"), std::string::npos) << text;
  EXPECT_NE(text.find("largest 2, bound 4\n"), std::string::npos) << text;
}

TEST(StatusText, NamesCannotCommandTheTerminal) {
  const std::string name = "\x1b[2J\r\n\x07\xc2\x9b\x7f\xff\u202eé";
  const std::string text = status_text(with_worker(worker("00000001", name)));
  EXPECT_NE(text.find("?[2J???????é"), std::string::npos) << text;
  for (const char c : text) EXPECT_TRUE(c == '\n' || (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f)) << int(c);
}

TEST(StatusText, NeedsNothing) {
  for (const json& status : {json::object(), json(), json::array(), json{{"workers", {{"list", {1, nullptr, "x"}}}}}})
    EXPECT_EQ(status_text(status).find("gradwire server: -, -, up -\n"), 0u);
}

}  // namespace
}  // namespace gradwire::server
